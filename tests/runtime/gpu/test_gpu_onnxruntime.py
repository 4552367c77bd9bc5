"""Provider "cuda": ONNX Runtime runs the networks on the runtime's stream, and records what comes again."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_ort_cuda
import pytest
from generations import PROMPTS
from tiny_engines import TinyLlama, pieces_of, segments_of


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def bundle(
    request: pytest.FixtureRequest, tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory, traces
) -> Path:
    """The tiny bundle with networks for CUDA; in float32 equal tokens show equal arithmetic."""
    folder = tmp_path_factory.mktemp("cuda") / "bundle"
    shutil.copytree(tiny_llama.exact, folder)
    pieces = pieces_of(tiny_llama.source, tiny_llama.routers.checkpoints, traces)
    return segments_of(tiny_llama.source, tiny_llama.routers, folder, pieces, request.param, "cuda").path


@pytest.fixture
def on_gpu(bundle: Path, ort_on_gpu: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script beside this on GPU 1 of the stand-ins."""

    def run(settings: list[dict[str, Any]], **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, on_ort_cuda.__file__, str(bundle), ort_on_gpu["TIDE_CUDART"]]
        return subprocess.run(
            [*command, json.dumps(PROMPTS), json.dumps(settings)],
            env=os.environ | ort_on_gpu | {"FAKE_ORT_DEVICE": "1"} | changes,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


EXITS = {"mode": "exit", "min_layers": 0, "max_pending": 4}


def test_tokens_are_those_of_the_cpu(thresholds: list[float], on_gpu) -> None:
    """A token at full depth is one wait for its result; a segment after which it may exit is one more."""
    exits = EXITS | {"threshold": thresholds}
    settings = [{"mode": "full"}, exits, {"mode": "lossless", "threshold": thresholds}, exits | {"logprobs": 1}]
    done = on_gpu(settings)
    assert done.returncode == 0, done.stderr
    assert "recorded" not in done.stderr
    counted = json.loads(done.stdout)
    networks = len(thresholds) + 1 + 2  # the segments, the head, and what finds the best logit
    assert counted["full"] == {"runs": networks, "recordings": 0, "replays": networks, "waits": 1}
    assert 1 < counted["exit"]["waits"] <= len(thresholds) + 1
    assert 0 < counted["all"]["recordings"] < counted["all"]["replays"]
    assert counted["released"] >= networks, "what is bound for a thread goes when it has ended"


CPU_NODE = "this session cannot use the graph capture feature"


@pytest.mark.parametrize(
    ("changes", "recordings", "says"),
    [
        ({"TIDE_CUDA_GRAPHS": "2"}, 2, "decoding slower: 2 took "),
        ({"TIDE_CUDA_GRAPHS": "0"}, 0, None),
        ({"FAKE_ORT_RECORDING": "operation not permitted"}, 1, "failed in segment_00: operation not permitted"),
        ({"FAKE_ORT_CPU_NODE": CPU_NODE}, 0, CPU_NODE),
    ],
)
@pytest.mark.parametrize("bundle", ["fp32"], indirect=True)
def test_what_is_not_recorded_is_run(
    thresholds: list[float], on_gpu, changes, recordings: int, says: str | None
) -> None:
    done = on_gpu([{"mode": "full"}, EXITS | {"threshold": thresholds}], **changes)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["all"]["recordings"] == recordings
    assert counted["full"]["waits"] == 1
    warnings = [line for line in done.stderr.splitlines() if "no more runs are recorded as CUDA graphs" in line]
    assert len(warnings) == (says is not None), done.stderr
    assert says is None or says in warnings[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"FAKE_ORT_MISSING": "libcublas.so.13: cannot open shared object file"},
            "ONNX Runtime cannot open its CUDA provider (libcublas.so.13: cannot open shared object file): pip install "
            "-e '.[cuda]' in the clone",
        ),
        ({"FAKE_CAPABILITY": "61"}, "GPU 1 has compute capability 6.1, and provider 'cuda' needs 7.5"),
        ({"FAKE_DRIVER": "1"}, "the GPU cannot be used: NVIDIA's driver is older than the CUDA runtime: update the"),
    ],
)
def test_what_does_not_fit_is_one_sentence(on_gpu, changes: dict[str, str], says: str) -> None:
    last = on_gpu([{"mode": "full"}], **changes).stderr.splitlines()[-1]
    assert last.startswith("tide_export.errors.ProviderError: ")
    assert says in last
