"""Run by test_gpu_recording in a process of its own, as the warning comes once a process: generates where recordings
fail. Arguments: the bundle, the stand-in for the CUDA runtime, the tokens of its prompt, and the function of CUDA that
fails; without one those of all recordings, one after the other."""

import logging
import os
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2])]

from caller_networks import callers_engine
from fake_cudart import FakeCudart

from tide_export.bundle.opened import open_bundle

RECORDING = ("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate")

if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    os.environ["TIDE_CUDART"] = sys.argv[2]
    cudart = FakeCudart(Path(sys.argv[2]))
    cudart.reset()
    prompt = [int(token) for token in sys.argv[3].split(",")]
    options = {"max_new_tokens": 12, "mode": "full", "stop_token_ids": []}
    functions = sys.argv[4:] or RECORDING
    if sys.argv[4:]:
        options = {"max_new_tokens": 40, "threshold": 0.4, "min_layers": 0, "stop_token_ids": []}
    for function in functions:
        cudart.failing = function.encode()
        engine, networks = callers_engine(open_bundle(Path(sys.argv[1])), cudart)
        for _ in range(2):
            print(*engine.generate(prompt, **options).tokens)
        assert cudart.calls(function)
        assert (cudart.calls("cudaGraphLaunch") == 0) == (function in RECORDING)
        del engine
        assert cudart.objects == 0
