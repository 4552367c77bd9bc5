"""Provider "cuda": ONNX Runtime runs the networks on a stream of its own, for which the runtime's must be done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import on_ort_cuda
from fake_cudart import compiled
from generations import PROMPTS
from tiny_engines import TinyLlama

from tide_export.runtime.native import onnxruntime_library


def test_tokens_are_those_of_the_cpu(
    tiny_llama: TinyLlama, thresholds: list[float], cudart_library: Path, shared: Path
) -> None:
    library = compiled(Path(__file__).with_name("fake_ort_cuda.cpp"), shared / "fake_ort_cuda.so", "-ldl")
    exits = {"mode": "exit", "threshold": thresholds, "min_layers": 0, "max_pending": 4}
    settings = [{"mode": "full"}, exits, {"mode": "lossless", "threshold": thresholds}, exits | {"logprobs": 1}]
    command = [sys.executable, on_ort_cuda.__file__, str(tiny_llama.exact), str(cudart_library)]
    variables = {"TIDE_ONNXRUNTIME": library, "FAKE_ORT_REAL": onnxruntime_library(), "FAKE_ORT_DEVICE": "1"}
    done = subprocess.run(
        [*command, json.dumps(PROMPTS), json.dumps(settings)],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "the same\n", done.stderr
