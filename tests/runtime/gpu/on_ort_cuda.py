"""Run by test_gpu_onnxruntime in a process of its own, as a process opens one ONNX Runtime: generates on the CPU and on
GPU 1 of the stand-in, and prints what was counted, JSON. 16-bit networks are compared with themselves on the CPU, where
TideExit is its function. Arguments: bundle, stand-in for the CUDA runtime, prompts and options as JSON lists."""

import ctypes
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from fake_cudart import FakeCudart

from tide_export.bundle.opened import open_bundle
from tide_export.runtime.engine import Engine, load, open_engine


def generated(engine: Engine, ids: list[Any], options: dict[str, Any]) -> list[Any]:
    found = engine.generate(ids, max_new_tokens=24, stop_token_ids=[], **options)
    return [(one.tokens, one.stats.exit_layer) for one in (found if isinstance(found, list) else [found])]


class Counters:
    """What the stand-ins count."""

    def __init__(self, gpu: FakeCudart) -> None:
        self.gpu, self.library = gpu, ctypes.CDLL(os.environ["TIDE_ONNXRUNTIME"])

    def read(self) -> dict[str, int]:
        names = ("runs", "recordings", "replays", "waits")
        found = {name: ctypes.c_long.in_dll(self.library, f"fake_ort_{name}").value for name in names}
        return found | {"waits": found["waits"] + self.gpu.calls("cudaStreamSynchronize")}

    def released_by_threads(self, engine: Engine, ids: list[int]) -> int:
        """Bindings that are released while three threads generate and end, one after the other."""
        released = ctypes.c_long.in_dll(self.library, "fake_ort_released")
        before = released.value
        for _ in range(3):
            thread = threading.Thread(target=engine.generate, args=(ids,), kwargs={"mode": "full", "max_new_tokens": 4})
            thread.start()
            thread.join()
        return released.value - before

    def of_a_token(self, engine: Engine, ids: list[int], options: dict[str, Any]) -> dict[str, float]:
        """Counts of one more token, once everything is recorded."""
        counts = []
        for tokens in (24, 24, 12):
            before = self.read()
            engine.generate(ids, max_new_tokens=tokens, stop_token_ids=[], **options)
            counts.append({name: value - before[name] for name, value in self.read().items()})
        return {name: (counts[1][name] - counts[2][name]) / 12 for name in counts[0]}


if __name__ == "__main__":
    bundle, cudart, prompts, settings = sys.argv[1], Path(sys.argv[2]), *map(json.loads, sys.argv[3:])
    os.environ["TIDE_CUDART"] = str(cudart)
    gpu = FakeCudart(cudart)
    gpu.reset(devices=2)
    gpu.only = 1
    if "FAKE_CAPABILITY" in os.environ:
        gpu.capability = int(os.environ["FAKE_CAPABILITY"])
    if "FAKE_DRIVER" in os.environ:
        gpu.driver = int(os.environ["FAKE_DRIVER"])
    networks = open_bundle(bundle).manifest.networks
    assert networks is not None
    reference = "cpu" if networks.weights == "fp32" else "cpu-networks"
    cpu, cuda = open_engine(open_bundle(bundle), reference, threads=1), load(bundle, provider="cuda", device=1)
    assert cuda.provider == "cuda"
    for options in settings:
        expected = [generated(cpu, prompt, options) for prompt in prompts]
        assert [generated(cuda, prompt, options) for prompt in prompts] == expected, options
        if options.get("mode") == "exit":
            assert generated(cuda, prompts, options) == [one for (one,) in expected], options
    assert gpu.calls("cudaMemcpyAsync") > 100
    assert gpu.calls("cudaLaunchKernel") > 20, "a checkpoint is a launch of the library's kernel"
    assert ctypes.c_int.in_dll(ctypes.CDLL(os.environ["TIDE_ONNXRUNTIME"]), "fake_ort_on_gpu").value
    counters = Counters(gpu)
    counted = {options["mode"]: counters.of_a_token(cuda, prompts[0], options) for options in settings[:2]}
    counted |= {"all": counters.read(), "released": counters.released_by_threads(cuda, prompts[0])}
    print(json.dumps(counted))
