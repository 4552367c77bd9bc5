"""One peer in a process of its own, which may be another Python environment: only the peer's packages are imported.

    python -P peer_process.py '{"peer": "optimum", "model": ..., "context": [ids], "threads": 2, "spin": 20, ...}'

It reads requests, one JSON object a line, and answers each with one line: first, unasked, `{"version": ...}` when it is
ready; then to `{"do": "step"}` the `{"seconds": ...}` of one greedy decode step after the context, and to `{"do":
"logits"}` the `ids` that the last step's `logits` follow. A failure is answered `{"error": ...}`. What libraries print
goes to standard error. Each peer is used as its documentation says, with what it exports kept in `folder`.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, Protocol

import numpy as np


class Job(NamedTuple):
    peer: str
    model: str
    context: list[int]
    threads: int
    spin: int  # microseconds that ONNX Runtime's threads wait before they sleep
    folder: str


class Peer(Protocol):
    """One decode step after another, always behind the same context.

    `ids` and `logits` are those of the last step: all tokens up to the one it was given, and what it said.
    """

    version: str
    ids: list[int]
    logits: np.ndarray

    def step(self) -> float: ...


def set_up_torch(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def torch_model(job: Job) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()


def session_options(job: Job) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(job.spin))
    return options


class Eager:
    """The Hugging Face model in PyTorch, with the cache it makes itself."""

    def __init__(self, job: Job) -> None:
        import torch

        self.version = f"transformers {version('transformers')}"
        self.ids = [*job.context, job.context[-1]]
        self._model, self._next = torch_model(job), torch.tensor([self.ids[-1:]])
        self._cache = self._model(input_ids=torch.tensor([job.context]), use_cache=True).past_key_values

    def step(self) -> float:
        started = time.perf_counter()
        output = self._model(input_ids=self._next, past_key_values=self._cache, use_cache=True)
        elapsed = time.perf_counter() - started
        self._cache.crop(-1)
        self.logits = output.logits[0, -1].numpy()
        return elapsed


class Tide:
    """TIDE's `generate` of one token, greedily. Its prefill is answered from memory: the one decode step remains.

    Its routers are random, at the layers where its own calibration would put them, and its threshold is 1: TIDE runs
    every layer in any case, and where no token leaves, its logits are those of full depth.
    """

    def __init__(self, job: Job) -> None:
        import torch
        from TIDE.config import TIDEConfig
        from TIDE.router import RouterCheckpoint, TokenRouter
        from TIDE.runtime import TIDERuntime

        class Prefilled(torch.nn.Module):
            """The model, which has read the context already."""

            def __init__(self, model: Any) -> None:
                super().__init__()
                self.model = model
                read = model(torch.tensor([job.context]), use_cache=True, return_dict=True)
                self.read = SimpleNamespace(past_key_values=read.past_key_values, logits=read.logits[:, -1:])

            def forward(self, ids: Any, **options: Any) -> Any:
                if "past_key_values" not in options:
                    return self.read
                self.said = self.model(ids, **options)
                return self.said

        self.version = f"tide-inference {version('tide-inference')}, transformers {version('transformers')}"
        logging.getLogger("TIDE").setLevel(logging.WARNING)  # it logs a line for each call, which is each step here
        model = torch_model(job)
        config = TIDEConfig(exit_threshold=1.0)
        size, layers = model.config.hidden_size, model.config.num_hidden_layers
        interval, bottleneck = config.checkpoint_interval, config.router_bottleneck_dim
        routers = {layer: TokenRouter(size, bottleneck) for layer in range(interval - 1, layers, interval)}
        path = Path(job.folder) / "router.pt"
        RouterCheckpoint(routers, size, bottleneck).save(path)
        self._runtime = TIDERuntime(model, path, config)
        self._runtime.model = self._model = Prefilled(model)
        self._context = torch.tensor([job.context])
        following = int(self._model.read.logits[0, -1].argmax())
        if following == 2:
            raise ValueError("the context is followed by token 2, at which TIDE stops whatever it means: ask another")
        self.ids = [*job.context, following]

    def step(self) -> float:
        started = time.perf_counter()
        self._runtime.generate(self._context, max_new_tokens=1, temperature=0.0)
        elapsed = time.perf_counter() - started
        self._model.read.past_key_values.crop(-1)
        self.logits = self._model.said.logits[0, -1].numpy()
        return elapsed


class Optimum:
    """Optimum's `ORTModelForCausalLM`, exported by itself, called as its `generate` calls it."""

    def __init__(self, job: Job) -> None:
        import torch
        from optimum.onnxruntime import ORTModelForCausalLM

        self.version = f"optimum-onnx {version('optimum-onnx')}, onnxruntime {version('onnxruntime')}"
        if not (Path(job.folder) / "model.onnx").exists():
            ORTModelForCausalLM.from_pretrained(job.model, export=True).save_pretrained(job.folder)
        self._model = ORTModelForCausalLM.from_pretrained(job.folder, session_options=session_options(job))
        context = torch.tensor([job.context])
        self._past = self._model(context, attention_mask=torch.ones_like(context), use_cache=True).past_key_values
        self.ids = [*job.context, job.context[-1]]
        self._inputs = {
            "input_ids": torch.tensor([self.ids[-1:]]),
            "attention_mask": torch.ones((1, len(self.ids)), dtype=torch.int64),
        }

    def step(self) -> float:
        started = time.perf_counter()
        output = self._model(**self._inputs, past_key_values=self._past, use_cache=True)
        elapsed = time.perf_counter() - started
        self.logits = output.logits[0, -1].numpy()
        return elapsed


class Exporters:
    """transformers.exporters' ONNX graph of a decode step, with its fusions for ONNX Runtime, run by its own runner."""

    def __init__(self, job: Job) -> None:
        import torch
        from transformers.exporters.base import ExportedModel
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
        from transformers.exporters.utils import decompose_for_generation

        self.version = f"transformers {version('transformers')}, onnxruntime {version('onnxruntime')}"
        model = torch_model(job)
        if not any(Path(job.folder).glob("*.onnx")):
            ids = torch.tensor([job.context[:8], job.context[1:9]])
            stages: Any = decompose_for_generation(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            step, example = stages["decode"]
            config = OnnxConfig(dynamic=True, ort_fusions="cpu")
            OnnxExporter().export(step, example, config).save_pretrained(job.folder)
        exported = ExportedModel.from_pretrained(job.folder, device="cpu", session_options=session_options(job))
        self._run: Any = exported.runners["model"]
        self.ids = [*job.context, job.context[-1]]
        taken = set(self._run.metadata.kwargs)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([self.ids[-1:]]),
            "attention_mask": torch.ones((1, len(self.ids)), dtype=torch.int64),
            "position_ids": torch.tensor([[len(job.context)]]),
            "past_key_values": model(input_ids=torch.tensor([job.context]), use_cache=True).past_key_values,
        }
        self._inputs = {name: value for name, value in inputs.items() if name in taken}

    def step(self) -> float:
        started = time.perf_counter()
        output = self._run(**self._inputs)
        elapsed = time.perf_counter() - started
        self.logits = output.logits[0, -1].numpy()
        return elapsed


PEERS: dict[str, Callable[[Job], Peer]] = {"eager": Eager, "tide": Tide, "optimum": Optimum, "exporters": Exporters}


def answer(peer: Peer, request: dict) -> dict:
    if request["do"] == "step":
        return {"seconds": peer.step()}
    return {"ids": peer.ids, "logits": peer.logits.astype(float).tolist()}


def serve(make: Callable[[], Peer], requests: IO[str], replies: IO[str]) -> None:
    """Answers until `requests` end, or until something fails."""

    def reply(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        peer = make()
        reply({"version": peer.version})
        for line in requests:
            reply(answer(peer, json.loads(line)))
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        raise


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not be taken for an answer
    job = Job(**json.loads(sys.argv[1]))

    def make() -> Peer:
        set_up_torch(job.threads)
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        return PEERS[job.peer](job)

    serve(make, sys.stdin, replies)


if __name__ == "__main__":
    main()
