"""A looped model's own gate on segment networks, which give its probabilities: the runtime sums them up, on the host or
on a GPU. Tokens and loops are those that the model's paper chooses, and of the engine on the graph."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_ort_cuda
import pytest
from caller_networks import callers_engine
from fake_cudart import OLD, FakeCudart
from generations import alone, exits, together, tokens_of
from looped_models import LAYERS, LOOPS, full_tokens, gated_tokens, make_looped, own_code, reference
from transformers import PreTrainedModel

from tide_export.bundle.file_names import SEGMENTS_FOLDER
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.model.source import load_model
from tide_export.pipeline.flow import export
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds

COUNT = 16
ENDS = [(loop + 1) * LAYERS for loop in range(LOOPS)]
PROMPTS = [[7], [5, 9, 3], [40, 2, 9, 33, 60, 12, 5]]
THRESHOLDS = (0.6, 0.75, 0.85)
SETTINGS: list[dict[str, Any]] = [
    {"mode": "exit", "threshold": 0.75, "max_pending": 0},
    {"mode": "exit", "threshold": [0.0, 0.7, 0.9], "min_layers": LAYERS + 1, "max_pending": 3},
    {"mode": "exit", "threshold": [0.7, 1.0, 0.8], "max_pending": 3, "temperature": 0.8, "seed": 4},
    {"mode": "lossless", "threshold": 0.5, "max_pending": 3},
    {"mode": "full"},
]


@pytest.fixture(scope="module", autouse=True)
def _code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_code(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_looped(tmp_path_factory.mktemp("looped") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return reference(folder)


def exported(folder: Path, output: Path, target: str, routers: str = "model") -> Path:
    """A bundle of the model with its gate or routers of a file, and networks for a GPU."""
    weights = "fp16" if target == "cuda" else "fp32"
    options: dict[str, Any] = {
        "weights": weights,
        "max_length": 64,
        "batch_size": 3,
        "engines": False,
        "trust_remote_code": True,
    }
    config = TideConfig(epsilon=0.0)  # nothing is measured
    return export(str(folder), output, config=config, routers=routers, targets=("onnxruntime", target), **options)


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(folder, tmp_path_factory.mktemp("networks") / "b", "tensorrt")


@pytest.fixture(params=["host", "host for a gpu", "gpu"])
def engine(request: pytest.FixtureRequest, bundle: Path, cudart: FakeCudart) -> Engine:
    """By who decides how deep a step goes."""
    if request.param == "host for a gpu":
        cudart.driver = cudart.runtime = OLD
    return callers_engine(open_bundle(bundle), None if request.param == "host" else cudart)[0]


def test_tokens_leave_after_the_loops_that_the_model_chooses(engine: Engine, model: PreTrainedModel) -> None:
    for prompt in PROMPTS:
        full = full_tokens(model, prompt, COUNT)
        options = {"max_new_tokens": COUNT, "stop_token_ids": []}
        assert engine.generate(prompt, mode="full", **options).tokens == full
        assert engine.generate(prompt, mode="lossless", threshold=0.5, **options).tokens == full
        for threshold in (0.0, *THRESHOLDS, 1.0):
            expected = gated_tokens(model, prompt, COUNT, threshold)
            for max_pending in (0, 3):
                found = engine.generate(prompt, mode="exit", threshold=threshold, max_pending=max_pending, **options)
                assert (found.tokens, list(found.stats.exit_layer)) == expected, (threshold, max_pending)


def test_every_mode_is_that_of_the_graph(engine: Engine, bundle: Path) -> None:
    """Also in lists, and where routers are off before or between those that decide."""
    graph, depths = load(bundle, provider="cpu", threads=1), set[int]()
    for options in SETTINGS:
        expected = [exits(one) for one in alone(graph, PROMPTS, **options)]
        depths |= {layers for one in expected for layers in one[2] if options["mode"] == "exit"}
        for _ in range(3):  # recorded, then replayed
            assert [exits(one) for one in alone(engine, PROMPTS, **options)] == expected, options
        seeds = {"seed": [4] * len(PROMPTS)} if "seed" in options else {}
        listed = together(engine, PROMPTS, **options | seeds)
        if options["mode"] == "lossless":  # which drafts are verified differs
            assert tokens_of(listed) == [one[0] for one in expected]
        else:
            assert [exits(one) for one in listed] == expected, options
    assert depths == set(ENDS)


def test_scores_are_the_sums(engine: Engine, bundle: Path) -> None:
    graph = load(bundle, provider="cpu", threads=1)
    for thresholds in ([0.7] * 3, [NEVER_EXIT] * 3, [NEVER_EXIT, 0.6, NEVER_EXIT]):
        states = [one.start(thresholds, 2) for one in (graph, engine)]
        for token in PROMPTS[2] * 3:
            expected, found = (state.step([token]) for state in states)
            assert (found.exit_layer, found.segments_run) == (expected.exit_layer, expected.segments_run)
            np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)


def test_routers_of_each_loop(folder: Path, tmp_path: Path, cudart: FakeCudart) -> None:
    """Those of a calibration, whose scores are not summed up: tokens and exits of the graph."""
    source = load_model(folder, trust_remote_code=True)
    routers, text = random_routers(source, ENDS[:-1], PROMPTS[2]), PROMPTS[2] * 4
    routers.save(tmp_path / "routers.safetensors")
    bundle = exported(folder, tmp_path / "b", "tensorrt", str(tmp_path / "routers.safetensors"))
    graph, options = load(bundle, provider="cpu", threads=1), {"min_layers": 0, "max_pending": 3}
    options |= {"mode": "exit", "threshold": dividing_thresholds(source, routers, text)}
    expected = [exits(one) for one in alone(graph, PROMPTS, **options)]
    assert len({layers for one in expected for layers in one[2]}) > 2
    for gpu in (None, cudart):
        engine, _ = callers_engine(open_bundle(bundle), gpu)
        for _ in range(3):
            assert [exits(one) for one in alone(engine, PROMPTS, **options)] == expected
    assert open_bundle(bundle).manifest.networks.cumulative is None


def test_the_loops_share_one_file_of_weights(bundle: Path, folder: Path) -> None:
    stored = sum(file.stat().st_size for file in (bundle / SEGMENTS_FOLDER).glob("*.data"))
    assert stored <= 1.05 * (folder / "model.safetensors").stat().st_size
    written = json.loads((bundle / "tide.json").read_text())
    assert (written["networks"]["cumulative"], written["model"]["hidden_size"]) == (True, 65), "64 and the sum"


def test_provider_cuda(folder: Path, tmp_path: Path, ort_on_gpu: dict[str, str]) -> None:
    """Its kernel compares with a threshold of what is left."""
    networks = exported(folder, tmp_path / "b", "cuda")
    command = [sys.executable, on_ort_cuda.__file__, str(networks), ort_on_gpu["TIDE_CUDART"]]
    settings = [SETTINGS[4], SETTINGS[0], SETTINGS[1], SETTINGS[3]]
    done = subprocess.run(
        [*command, json.dumps(PROMPTS), json.dumps(settings)],
        env=os.environ | ort_on_gpu | {"FAKE_ORT_DEVICE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit"]["waits"] > 1
