"""One runtime with one file of a model, in a process of its own, which may be another Python environment.

    python -P runtime_process.py '{"runtime": "llama.cpp", "file": "f.gguf", "threads": 2, "length": 4224, "batch": 8}'

It reads requests, one JSON object a line, and answers each with one line: first, unasked, `{"version": ..., "load":
seconds}` when the model is loaded; to `{"do": "generate", "prompts": [[ids], ...], "tokens": n}` the seconds until all
prompts have their `first` token and those of the `rest`, n - 1 each, chosen greedily whatever ends a text; to `{"do":
"nll", "ids": [...]}` the nats of each token of a text after its first; to `{"do": "memory"}` the megabytes resident
now. A failure is answered `{"error": ...}`, and the next request is read. What libraries print goes to standard error.
"""

import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NO_FLASH = ":no-flash"


class Question(NamedTuple):
    """One prompt to be answered (answer_process.py)."""

    prompt: list[int]
    tokens: int  # of the answer, at most
    temperature: float
    top_k: int  # for temperatures above 0
    seed: int


class Job(NamedTuple):
    runtime: str
    file: str
    threads: int
    length: int  # tokens a sequence has room for
    batch: int  # sequences decoded at the same time, at most


class Runtime:
    """A loaded model."""

    version: str

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """Seconds until every prompt has its first token, and of the tokens - 1 that follow in each."""
        raise NotImplementedError

    def nll(self, ids: Sequence[int]) -> list[float]:
        """Nats of the tokens after the first, each read after the one before it; none where there are no logits."""
        return []

    def answer(self, question: Question) -> dict[str, Any]:
        """`seconds` and `tokens` after the first of an answer, and its `text`."""
        raise NotImplementedError


class Tide(Runtime):
    """tide_export's engine, at full depth or in another mode: `file` is BUNDLE or BUNDLE:MODE."""

    def __init__(self, job: Job) -> None:
        from tide_export.runtime.engine import load
        from tide_export.runtime.scheduler import SchedulerLimits

        file, _, mode = job.file.partition(":")
        self.version, self._mode = f"tide_export {version('tide_export')}", mode or "full"
        self._engine = load(file, "cpu", job.threads, verify=False)
        self._scheduler = self._engine.scheduler(SchedulerLimits(slots=job.batch)) if job.batch > 1 else None

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        options: Any = {"max_new_tokens": tokens, "stop_token_ids": [], "mode": self._mode}
        started = time.perf_counter()
        if len(prompts) == 1:
            stream = self._engine.stream(prompts[0], **options)
            next(stream)
            first = time.perf_counter()
            stream.finish()
        else:
            assert self._scheduler is not None
            handles = [self._scheduler.submit(prompt, **options) for prompt in prompts]
            for handle in handles:
                next(handle)
            first = time.perf_counter()
            for handle in handles:
                handle.result()
        return first - started, time.perf_counter() - first

    def nll(self, ids: Sequence[int]) -> list[float]:
        from tide_export.thresholds.resolve import NEVER_EXIT

        sequence = self._engine.start([NEVER_EXIT] * len(self._engine.manifest.checkpoints))
        return [nats(sequence.step([token]).logits, following) for token, following in pairwise(ids)]


class Transformers(Runtime):
    """Hugging Face's model in eager PyTorch, in float32: `file` is its folder."""

    def __init__(self, job: Job) -> None:
        import torch
        import transformers

        torch.set_num_threads(job.threads)
        torch.set_grad_enabled(False)
        self.version = f"transformers {transformers.__version__}"
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.file, dtype=torch.float32)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        started = time.perf_counter()
        past, logits = self._read(prompts, None, len(prompts[0]))
        first = time.perf_counter()
        for step in range(1, tokens):
            past, logits = self._read(logits.argmax(-1, keepdims=True), past, len(prompts[0]) + step)
        return first - started, time.perf_counter() - first

    def nll(self, ids: Sequence[int]) -> list[float]:
        past, values = None, []
        for length, (token, following) in enumerate(pairwise(ids), 1):
            past, logits = self._read([[token]], past, length)
            values.append(nats(logits[0], following))
        return values

    def _read(self, ids: Any, past: Any, length: int) -> tuple[Any, np.ndarray]:
        """Reads tokens [B, n], which make each sequence `length` long; the cache, and logits [B, V] of the last."""
        import torch

        mask = torch.ones((len(ids), length), dtype=torch.int64)
        read = self._model(torch.tensor(np.asarray(ids)), attention_mask=mask, past_key_values=past, use_cache=True)
        return read.past_key_values, read.logits[:, -1].numpy()


class LlamaCpp(Runtime):
    """llama.cpp by its own C functions, as its command line calls them: `file` is a GGUF file, or one followed by
    `:no-flash`, without flash attention, which on a CPU reads prompts sooner and decodes more slowly."""

    def __init__(self, job: Job) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self.version = f"llama_cpp_python {version('llama_cpp_python')}"
        file = job.file.removesuffix(NO_FLASH)
        self._model = self._api.llama_model_load_from_file(file.encode(), self._api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"{file} cannot be loaded")
        settings = self._api.llama_context_default_params()
        if file != job.file:
            settings.flash_attn_type = self._api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.n_ctx, settings.n_seq_max = job.length * job.batch, job.batch
        settings.n_threads = settings.n_threads_batch = job.threads
        settings.n_batch = settings.n_ubatch = self._chunk = 512
        self._context = self._api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"no context of {settings.n_ctx} tokens")
        self._vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(self._chunk, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        self._clear()
        started = time.perf_counter()
        following = []
        for slot, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), self._chunk):
                part = prompt[begin : begin + self._chunk]
                last = begin + len(part) == len(prompt)
                self._decode([(id, begin + i, slot, last and i + 1 == len(part)) for i, id in enumerate(part)])
            following.append(int(self._logits(len(part) - 1).argmax()))
        first = time.perf_counter()
        for step in range(tokens - 1):
            read = [(id, len(prompts[slot]) + step, slot, True) for slot, id in enumerate(following)]
            self._decode(read)
            following = [int(self._logits(slot).argmax()) for slot in range(len(prompts))]
        return first - started, time.perf_counter() - first

    def nll(self, ids: Sequence[int]) -> list[float]:
        self._clear()
        values = []
        for position, (token, following) in enumerate(pairwise(ids)):
            self._decode([(token, position, 0, True)])
            values.append(nats(self._logits(0), following))
        return values

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def _decode(self, read: Sequence[tuple[int, int, int, bool]]) -> None:
        """Runs the model over tokens: (id, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(read)
        for i, (token, position, sequence, wanted) in enumerate(read):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise ValueError(f"llama_decode returned {status}")

    def _logits(self, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, index), (self._vocab_size,))


class Genai(Runtime):
    """ONNX Runtime GenAI's own loop (`Generator`): `file` is the folder that its builder made."""

    def __init__(self, job: Job) -> None:
        import onnxruntime_genai

        self._api: Any = onnxruntime_genai
        self.version = f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"
        config = self._api.Config(job.file)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": job.threads}}}}))
        self._model = self._api.Model(config)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        started = time.perf_counter()
        generator = self._generator(len(prompts), len(prompts[0]) + tokens)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return first - started, time.perf_counter() - first

    def nll(self, ids: Sequence[int]) -> list[float]:
        generator = self._generator(1, len(ids) + 1)
        values = []
        for token, following in pairwise(ids):
            generator.append_tokens(np.array([[token]], np.int32))
            values.append(nats(np.asarray(generator.get_logits()).reshape(-1), following))
        return values

    def _generator(self, batch: int, length: int) -> Any:
        settings = self._api.GeneratorParams(self._model)
        settings.set_search_options(
            batch_size=batch, max_length=length, min_length=length, do_sample=False, past_present_share_buffer=True
        )
        return self._api.Generator(self._model, settings)


class OpenVino(Runtime):
    """OpenVINO GenAI's `LLMPipeline`: `file` is a folder of OpenVINO's format. It gives no logits."""

    def __init__(self, job: Job, **options: Any) -> None:
        import openvino_genai

        self._api: Any = openvino_genai
        self.version = f"openvino-genai {version('openvino-genai')}"
        self._pipeline = self._api.LLMPipeline(
            job.file, "CPU", INFERENCE_NUM_THREADS=job.threads, INFERENCE_PRECISION_HINT="f32", **options
        )

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        config = self._api.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        result, total = self.run(prompts, config)
        if any(len(answer) != tokens for answer in result.tokens):
            raise ValueError(f"answers of {[len(answer) for answer in result.tokens]} tokens, not {tokens}")
        first = result.perf_metrics.get_ttft().mean / 1e3
        return first, total - first

    def run(self, prompts: Sequence[Sequence[int]], config: Any) -> tuple[Any, float]:
        """The pipeline's result and its seconds."""
        import openvino

        ids = np.array(prompts, np.int64)
        inputs = self._api.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        started = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        return result, time.perf_counter() - started


class Server(Runtime):
    """llama-server of llama.cpp or ik_llama.cpp, timed by itself: `file` is its command with the model and options,
    such as `bin/llama-server -m f.gguf --spec-type ngram-mod`. It gives no logits."""

    def __init__(self, job: Job) -> None:
        command = shlex.split(job.file)
        reported = subprocess.run([command[0], "--version"], capture_output=True, text=True)
        self.version = " ".join((reported.stdout + reported.stderr).split()[:3]) or command[0]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"http://127.0.0.1:{free.getsockname()[1]}"
        sizes = {"-t": job.threads, "-tb": job.threads, "-c": job.length * job.batch, "-np": job.batch}
        options = [word for name, value in sizes.items() for word in (name, str(value))]
        port = self._address.rpartition(":")[2]
        command += [*options, "--host", "127.0.0.1", "--port", port]
        self._process = subprocess.Popen(command, stdout=2, preexec_fn=end_with_parent)
        while not self._is_ready():
            time.sleep(0.02)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            timings = list(pool.map(lambda prompt: self._timings(prompt, tokens), prompts))
        if len(prompts) == 1:
            return timings[0]["prompt_ms"] / 1e3, timings[0]["predicted_ms"] / 1e3
        first = max(timing["prompt_ms"] for timing in timings) / 1e3
        return first, time.perf_counter() - started - first

    def complete(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Its reply to `/completion`."""
        body = json.dumps(wanted | {"cache_prompt": False}).encode()
        request = urllib.request.Request(f"{self._address}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def _timings(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        wanted = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
        timings = self.complete(wanted)["timings"]
        if timings["predicted_n"] != tokens:
            raise ValueError(f"an answer of {timings['predicted_n']} tokens, not {tokens}")
        return timings

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise ValueError(f"the server ended with exit code {self._process.returncode}")
        try:
            with urllib.request.urlopen(f"{self._address}/health") as reply:
                return reply.status == 200
        except OSError:
            return False


RUNTIMES: dict[str, Callable[[Job], Runtime]] = {"tide": Tide, "eager": Transformers, "llama.cpp": LlamaCpp}
RUNTIMES |= {"genai": Genai, "openvino": OpenVino, "server": Server}


def end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, however that is."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def nats(logits: np.ndarray, token: int) -> float:
    """The negative logarithm of the probability of `token`."""
    exact = logits.astype(np.float64)
    highest = exact.max()
    return float(highest + np.log(np.exp(exact - highest).sum()) - exact[token])


def resident(process: int | str) -> float:
    """Megabytes of a process in memory, shared and mapped files included."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def answer(runtime: Runtime, request: dict) -> dict:
    if request["do"] == "generate":
        first, rest = runtime.generate(request["prompts"], request["tokens"])
        return {"first": first, "rest": rest}
    if request["do"] == "answer":
        return runtime.answer(Question(**request["question"]))
    if request["do"] == "nll":
        return {"nll": runtime.nll(request["ids"])}
    return {"memory": resident(getattr(runtime, "process_id", "self"))}


def main(runtimes: Mapping[str, Callable[[Job], Runtime]] | None = None) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not be taken for an answer

    def reply(make: Callable[[], dict]) -> None:
        try:
            message = make()
        except Exception as error:
            message = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    job = Job(**json.loads(sys.argv[1]))
    loaded: list[Runtime] = []

    def load() -> dict:
        started = time.perf_counter()
        loaded.append((runtimes or RUNTIMES)[job.runtime](job))
        return {"version": loaded[0].version, "load": time.perf_counter() - started}

    reply(load)
    for line in sys.stdin:
        reply(partial(answer, loaded[0], json.loads(line)))


if __name__ == "__main__":
    main()
