"""Looped models on exact K/V of every loop: `full` equals all loops in Hugging Face, `exit` the gate's choice of loop,
as the model's paper has it and as the oracle has it, and `lossless` equals `full`."""

import ctypes
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looped_models import LAYERS, LOOPS, full_tokens, gated_tokens, make_looped, own_code, reference
from parity.test_families import PROMPTS, check_drafter, check_graph
from private_memory import private_memory
from transformers import PreTrainedModel

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.flow import export
from tide_export.quantize.flow import quantize_model
from tide_export.routers.model_gate import gate_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.tuning import drafter_gain
from tide_export.tuning.report import Comparison
from tide_export.tuning.request import LosslessRequest
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import check_exit, check_full, check_lossless

COUNT = 30
THRESHOLDS = (0.6, 0.75, 0.85)
ENDS = [(loop + 1) * LAYERS for loop in range(LOOPS)]


@pytest.fixture(scope="module", autouse=True)
def _code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_code(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_looped(tmp_path_factory.mktemp("looped") / "model", vocab_size=512)


@pytest.fixture(scope="module")
def source(folder: Path) -> SourceModel:
    return load_model(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return reference(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    output, config = tmp_path_factory.mktemp("bundle") / "b", TideConfig(epsilon=0.0)  # nothing is measured
    bundle = export(str(folder), output, config=config, routers="model", weights="fp32", trust_remote_code=True)
    return load(bundle, provider="cpu", threads=1)


@pytest.mark.parametrize(("speed", "mode"), [(1.4, "lossless"), (0.97, "full")])
def test_export_measures_what_the_gate_gains_as_drafts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float, mode: str
) -> None:
    """Without calibration nothing bounds what exits change; drafts change nothing."""
    compared: list[int] = []

    def compare(one: Engine, other: Engine, prompts: list[list[int]], request: LosslessRequest) -> Comparison:
        compared.append(len(prompts))
        assert one.generate(prompts[0], mode="lossless", max_new_tokens=request.new_tokens).tokens
        return Comparison(speed)

    monkeypatch.setattr(drafter_gain, "compare", compare)
    options: dict[str, Any] = {"routers": "model", "weights": "fp32", "trust_remote_code": True, "validate": False}
    auto = open_bundle(export(str(folder), tmp_path / "b", **options)).manifest.auto
    assert auto is not None
    assert (auto.mode, auto.lossless_speedup, auto.exit_speedup, compared) == (mode, speed, None, [12])
    off = TideConfig(epsilon=0.0)
    assert open_bundle(export(str(folder), tmp_path / "c", config=off, **options)).manifest.auto is None
    assert compared == [12]


def test_weights_are_stored_once_and_keys_and_values_for_every_loop(engine: Engine, folder: Path, capsys) -> None:
    manifest = engine.manifest
    assert manifest.model.loops == LOOPS
    assert main(["inspect", str(engine.bundle.path)]) == 0
    assert f"(LoopedForCausalLM, {LAYERS * LOOPS} layers in {LOOPS} loops, " in capsys.readouterr().out
    assert (manifest.model.num_layers, manifest.checkpoints) == (LAYERS * LOOPS, tuple(ENDS[:-1]))
    assert (manifest.thresholds, manifest.min_layers) == ((0.6,) * (LOOPS - 1), 0)
    assert manifest.model.kv_shapes == ((2, 16),) * LAYERS * LOOPS
    stored = (engine.bundle.path / WEIGHTS_FILE).stat().st_size
    assert stored <= 1.05 * (folder / "model.safetensors").stat().st_size


def test_the_loops_share_one_packed_copy_of_their_weights(tmp_path: Path) -> None:
    """ONNX Runtime copies float32 weights into a layout of its own; one copy for each loop would be four."""
    wide = make_looped(tmp_path / "wide", hidden_size=512, intermediate_size=1536)
    options: dict[str, Any] = {"routers": "model", "weights": "fp32", "trust_remote_code": True, "validate": False}
    bundle = export(str(wide), tmp_path / "bundle", config=TideConfig(epsilon=0.0), **options)
    weights = (bundle / WEIGHTS_FILE).stat().st_size
    ctypes.CDLL(None).malloc_trim(0)
    before = private_memory()
    engine = load(bundle, provider="cpu", threads=1)
    assert weights < private_memory(engine) - before < 2.5 * weights  # an engine without weights: 18 MB


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_full_and_exit_and_lossless(engine: Engine, model: PreTrainedModel, prompt: list[int]) -> None:
    full = full_tokens(model, prompt, COUNT)
    greedy = {"max_new_tokens": COUNT, "stop_token_ids": []}
    assert engine.generate(prompt, mode="full", **greedy).tokens == full
    for threshold in (0.0, *THRESHOLDS, 1.0):
        tokens, layers = gated_tokens(model, prompt, COUNT, threshold)
        for max_pending in (1, 16):
            found = engine.generate(prompt, mode="exit", threshold=threshold, max_pending=max_pending, **greedy)
            assert found.tokens == tokens
            assert list(found.stats.exit_layer) == layers
    tokens, _ = gated_tokens(model, prompt, COUNT, 0.6)
    assert engine.generate(prompt, mode="exit", **greedy).tokens == tokens, "the model's own threshold is the default"
    for options in ({}, {"prompt_lookup": 0, "threshold": 0.0, "max_pending": 3}, {"threshold": THRESHOLDS[1]}):
        assert engine.generate(prompt, mode="lossless", **options, **greedy).tokens == full


def test_every_loop_is_one_that_some_token_exits_after(model: PreTrainedModel) -> None:
    depths = [gated_tokens(model, prompt, COUNT, threshold)[1] for prompt in PROMPTS for threshold in THRESHOLDS]
    assert {layers for run in depths for layers in run} == set(ENDS)


def test_the_oracle_agrees(engine: Engine, source: SourceModel) -> None:
    """Also with thresholds of their own for each loop, and one after which nothing exits."""
    routers = gate_routers(source)
    assert np.all(np.diff(oracle(source, routers, PROMPTS[2], [2.0] * 3).scores.numpy()) > 0), "shares add up"
    full = check_full(engine, source, PROMPTS, COUNT)
    assert full.holds, full.differences
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    for thresholds, max_pending in ((middle, 4), ([2.0, *middle[1:]], 1), ([middle[0], 2.0, middle[2]], 16)):
        check = check_exit(engine, source, routers, PROMPTS, COUNT, thresholds, max_pending)
        assert check.holds, check.differences
    drafts = check_lossless(engine, source, PROMPTS, COUNT, threshold=0.0, max_pending=3)
    assert drafts.holds, drafts.differences
    assert drafts.drafted > drafts.accepted > 0
    check_graph(engine.bundle, source, routers, middle)


def test_lists_and_a_scheduler_with_a_prefix_cache(engine: Engine) -> None:
    order = random.Random(0)
    choices = [{"mode": "full"}, {"mode": "lossless"}, *({"mode": "exit", "threshold": one} for one in THRESHOLDS)]
    choices.append({"mode": "exit", "threshold": 0.75, "temperature": 0.8, "seed": 3})
    for options in choices:
        options |= {"max_new_tokens": COUNT, "stop_token_ids": []}
        alone = [engine.generate(prompt, **options).tokens for prompt in PROMPTS]
        assert [found.tokens for found in engine.generate(PROMPTS, **options)] == alone
    scheduler, handles = engine.scheduler(SchedulerLimits(slots=3, prefix_cache_bytes=1 << 20)), []
    while len(handles) < 24 or scheduler.running or scheduler.waiting:
        if len(handles) < 24:
            prompt = PROMPTS[2][: order.choice((16, 17, 32, 40))] + [7] * order.choice((0, 1, 3))
            options = order.choice(choices)
            handles.append((prompt, options, scheduler.submit(prompt, **options)))
        scheduler.step()
    for prompt, options, handle in handles:
        assert handle.result().tokens == engine.generate(prompt, **options).tokens
    assert sum(handle.cached_tokens for *_, handle in handles) > 100


def test_a_drafter(engine: Engine, source: SourceModel, tmp_path: Path) -> None:
    shutil.copytree(engine.bundle.path, tmp_path / "b")
    check_drafter(source, tmp_path / "b")


def test_int4(folder: Path, tmp_path: Path) -> None:
    """With products in float32, so that the rounded weights are the only change; `full` of Hugging Face has it too."""
    fields = {"routers": "model", "weights": "int4", "block_size": 32, "trust_remote_code": True}
    bundle = export(str(folder), tmp_path / "exact", accuracy_level=1, **fields)
    engine, source = load(bundle, provider="cpu", threads=1), load_model(folder, trust_remote_code=True)
    assert (bundle / WEIGHTS_FILE).stat().st_size < 0.2 * (folder / "model.safetensors").stat().st_size
    quantize_model(source, Quantization(**engine.manifest.quantization.__dict__), [])
    greedy = {"max_new_tokens": COUNT, "stop_token_ids": []}
    for prompt in PROMPTS:
        full = full_tokens(source.model, prompt, COUNT)
        assert engine.generate(prompt, mode="full", **greedy).tokens == full
        assert engine.generate(prompt, mode="lossless", threshold=0.0, **greedy).tokens == full
        for threshold in THRESHOLDS:
            tokens, layers = gated_tokens(source.model, prompt, COUNT, threshold)
            found = engine.generate(prompt, mode="exit", threshold=threshold, **greedy)
            assert (found.tokens, list(found.stats.exit_layer)) == (tokens, layers)


def test_calibrated_routers_and_lenses(tmp_path: Path, demo_model: Path, text: Path) -> None:
    """`calibrate` fits them after every loop; `exit` is TIDE's rule with them."""
    folder = make_looped(tmp_path / "model", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((demo_model / name).read_text())
    routers, options = str(tmp_path / "r.safetensors"), ["-q", "--trust-remote-code"]
    sizes = "--calibration-samples 12 --calibration-length 32 --router-epochs 2 --lens-tokens 64 --exit-strategy lens"
    assert main(["calibrate", str(folder), "-o", routers, *options, "--dataset", str(text), *sizes.split()]) == 0
    made, source = RouterSet.load(routers), load_model(folder, trust_remote_code=True)
    assert (made.strategy, made.cumulative) == ("lens", False)
    assert set(made.checkpoints) < set(ENDS), "those from which some tokens may exit"
    bundle = export(str(folder), tmp_path / "b", routers=routers, weights="fp32", trust_remote_code=True)
    engine, middle = load(bundle, provider="cpu", threads=1), dividing_thresholds(source, made, PROMPTS[2])
    assert engine.manifest.min_layers == 0
    check = check_exit(engine, source, made, PROMPTS, COUNT, middle, 4)
    assert check.holds, check.differences
    assert set(check.exits) >= set(made.checkpoints)
    full = check_full(engine, source, PROMPTS, COUNT)
    assert full.holds, full.differences
    checked = "--prompts 2 --longest-prompt 8 --new-tokens 4 --threads 1 --dataset"
    assert main(["validate", str(bundle), "--model", str(folder), *options, *checked.split(), str(text)]) == 0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = [f"def f{n}(a, b):\n    return a * {n} + b\n\n\ndef g{n}():\n    return {n * n}\n" * 4 for n in range(12)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return tmp_path / "text.jsonl"
