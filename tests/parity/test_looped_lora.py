"""Low-rank adapters of looped models: one for all loops, `full` and `exit` as Hugging Face with peft computes them, in
lists each sequence has its own, and without one nothing changes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from looped_models import LAYERS, LOOPS, full_tokens, gated_tokens, make_looped, own_code, reference
from parity.test_families import PROMPTS
from parity.test_lora import TARGETS, Adapted, adapter_at
from peft import PeftModel
from transformers import PreTrainedModel

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.manifest import Quantization
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.flow import export
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.half import round_to_half
from tide_export.routers.model_gate import gate_routers
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full, check_lossless

COUNT, RANK = 20, 8
THRESHOLDS = (0.6, 0.75, 0.85)
GREEDY: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": []}
# Small changes: larger random ones grow in each loop, and rounding errors of float32 with them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "lora_alpha": 2, "target_modules": TARGETS["llama"]},
    "two": {"r": RANK, "lora_alpha": 6, "use_rslora": True, "target_modules": ["v_proj", "up_proj"]},
}


@dataclass
class Case:
    """A bundle with room for adapters, loaded with `ADAPTERS`, and the models with them by peft; of None without."""

    folder: Path
    engine: Engine
    sources: dict[str | None, SourceModel]


@pytest.fixture(scope="module", autouse=True)
def _code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_code(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return exported(tmp_path_factory.mktemp("looped"), weights="fp32")


def exported(folder: Path, **weights: Any) -> Case:
    """Where the weights are rounded, the adapters are those of the rounded model."""
    model = make_looped(folder / "model", vocab_size=512)
    options: dict[str, Any] = {"routers": "model", "trust_remote_code": True, **weights}
    bundle = export(str(model), folder / "bundle", lora_rank=RANK, **options)
    engine = load(bundle, provider="cpu", threads=1)
    source = load_model(model, trust_remote_code=True)
    if (rounded := engine.manifest.quantization) is not None:
        quantize_model(source, Quantization(**rounded.__dict__), [])
    elif engine.manifest.weights == "bf16":
        round_to_half(source, "bf16")
    sources: dict[str | None, SourceModel] = {None: source}
    for seed, (name, config) in enumerate(ADAPTERS.items(), start=1):
        sources[name] = adapter_at(folder / name, source, seed, **config)
    return Case(folder, load(bundle, provider="cpu", threads=1, adapters={n: folder / n for n in ADAPTERS}), sources)


def check_tokens(engine: Engine, adapter: str | None, model: PreTrainedModel, prompt: list[int]) -> set[int]:
    """Compares all modes with what `model` itself gives; returns the layers after which tokens exit."""
    full, depths = full_tokens(model, prompt, COUNT), set[int]()
    assert engine.generate(prompt, mode="full", adapter=adapter, **GREEDY).tokens == full
    for threshold in THRESHOLDS:
        tokens, layers = gated_tokens(model, prompt, COUNT, threshold)
        for max_pending in (1, 16):
            options: dict[str, Any] = {"mode": "exit", "threshold": threshold, "max_pending": max_pending}
            found = engine.generate(prompt, adapter=adapter, **options, **GREEDY)
            assert (found.tokens, list(found.stats.exit_layer)) == (tokens, layers)
        depths |= {*layers}
    choices: list[dict[str, Any]] = [{}, {"prompt_lookup": 0, "threshold": 0.0, "max_pending": 3}, {"threshold": 0.75}]
    for options in choices:
        assert engine.generate(prompt, mode="lossless", adapter=adapter, **options, **GREEDY).tokens == full
    return depths


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_all_modes_as_peft_beside_the_weights(case: Case, adapter: str | None) -> None:
    """peft's model computes its matrices beside those of the model, as the bundle does, in every loop."""
    model = reference(case.folder / "model")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, case.folder / adapter).eval().base_model.model
    depths = [check_tokens(case.engine, adapter, model, prompt) for prompt in PROMPTS]
    assert set().union(*depths) == {(loop + 1) * LAYERS for loop in range(LOOPS)}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_oracle_agrees(case: Case, adapter: str) -> None:
    source, routers = case.sources[adapter], gate_routers(case.sources[adapter])
    engine: Any = Adapted(case.engine, adapter)
    full = check_full(engine, source, PROMPTS, COUNT)
    assert full.holds, (full.max_error, full.largest_logit, full.differences)
    assert full.max_error < 1e-3
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    for thresholds, max_pending in ((middle, 4), ([2.0, *middle[1:]], 1)):
        check = check_exit(engine, source, routers, PROMPTS, COUNT, thresholds, max_pending)
        assert check.holds, check.differences
    drafts = check_lossless(engine, source, PROMPTS, COUNT, threshold=0.0, max_pending=3)
    assert drafts.holds, drafts.differences


def test_adapters_do_not_mix_in_a_list_or_a_batch(case: Case) -> None:
    order, engine = random.Random(0), case.engine
    choices: list[dict[str, Any]] = [{"mode": "exit", "threshold": one} for one in THRESHOLDS]
    choices += [{"mode": "full"}, {"mode": "lossless"}]
    choices.append({"mode": "exit", "threshold": 0.75, "temperature": 0.8, "seed": 3})
    names = (None, *ADAPTERS)
    for options in choices:
        texts = []
        for name in names:
            asked = dict[str, Any](adapter=name, **options, **GREEDY)
            alone = [engine.generate(prompt, **asked).tokens for prompt in PROMPTS]
            assert [found.tokens for found in engine.generate(PROMPTS, **asked)] == alone
            texts.append(alone[2])
        assert len({tuple(text) for text in texts}) == len(names), "the adapters change no token"
    scheduler, handles = engine.scheduler(SchedulerLimits(slots=3, prefix_cache_bytes=1 << 20)), []
    while len(handles) < 24 or scheduler.running or scheduler.waiting:
        if len(handles) < 24:
            prompt = PROMPTS[2][: order.choice((16, 17, 32, 40))] + [7] * order.choice((0, 1, 3))
            asked = dict[str, Any](adapter=order.choice(names), **order.choice(choices), **GREEDY)
            handles.append((prompt, asked, scheduler.submit(prompt, **asked)))
        scheduler.step()
    for prompt, asked, handle in handles:
        assert handle.result().tokens == engine.generate(prompt, **asked).tokens
    assert sum(handle.cached_tokens for *_, handle in handles) > 100


def test_an_adapter_is_stored_once_and_each_target_names_its_layers(case: Case) -> None:
    manifest = case.engine.manifest
    lora = manifest.model.lora
    assert lora is not None
    assert len(lora.targets) == len(TARGETS["llama"]) * LAYERS
    assert {target.layers for target in lora.targets} == {
        tuple(range(layer, manifest.model.num_layers, LAYERS)) for layer in range(LAYERS)
    }
    weights = case.folder / "model" / "model.safetensors"
    assert (case.engine.bundle.path / WEIGHTS_FILE).stat().st_size <= 1.05 * weights.stat().st_size


@pytest.mark.parametrize("weights", [{"weights": "bf16"}, {"weights": "int4", "block_size": 32, "accuracy_level": 1}])
def test_rounded_weights(weights: dict[str, Any], tmp_path: Path) -> None:
    """With products in float32, so that the rounded weights are the only change."""
    case = exported(tmp_path, **weights)
    for name, source in case.sources.items():
        check_tokens(case.engine, name, source.model, PROMPTS[2])
