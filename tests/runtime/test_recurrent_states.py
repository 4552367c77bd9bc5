"""What a sequence with recurrent states can do beside decoding: go back, read its prompt in parts, share a batch."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import tiers
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of

from tide_export.bundle.manifest import INT8_KV
from tide_export.calibration.config import TideConfig
from tide_export.errors import GenerationError, UnsupportedModelError
from tide_export.pipeline.flow import export
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.serving.service import default_prefix_cache_bytes

FAMILY = "qwen3_5 (text)"  # convolutions, the delta rule and attention
UNDO = 32
TEXT = [(i * 37) % 500 + 3 for i in range(120)]
OPTIONS = {"max_new_tokens": 20, "stop_token_ids": []}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    source = build(FAMILY)
    routers = random_routers(source, CHECKPOINTS, TEXT[:40], bottleneck=16)
    folder = tmp_path_factory.mktemp("recurrent") / "bundle"
    return engine_of(source, routers, folder, kv_cache=INT8_KV)


def logits_after(engine: Engine, ids: list[int]) -> np.ndarray:
    return np.array(engine.start([2.0] * len(CHECKPOINTS)).step(ids, full=True).logits[-1])


def test_a_sequence_goes_back_as_far_as_its_log(engine: Engine) -> None:
    state, random = engine.start([2.0] * len(CHECKPOINTS)), Random(3)
    state.step(TEXT[:50], full=True)
    length = 50
    for _ in range(12):
        drafts = random.randint(1, UNDO)
        state.step([7] * drafts, full=True)
        kept = random.randint(0, min(3, drafts))
        state.rewind(length)
        found = np.array(state.step(TEXT[length : length + kept + 1], full=True).logits[-1])
        length += kept + 1
        np.testing.assert_array_equal(found, logits_after(engine, TEXT[:length]))


def test_it_goes_no_further(engine: Engine) -> None:
    state = engine.start([2.0] * len(CHECKPOINTS))
    state.step(TEXT, full=True)
    state.rewind(len(TEXT) - UNDO)
    state.step(TEXT[len(TEXT) - UNDO :], full=True)
    with pytest.raises(GenerationError, match="cannot be rewound to 87 tokens: they are known after 88 and more, or"):
        state.rewind(len(TEXT) - UNDO - 1)
    assert state.length == len(TEXT)
    state.rewind(0)
    found = np.array(state.step(TEXT[:9], full=True).logits[-1])
    np.testing.assert_array_equal(found, logits_after(engine, TEXT[:9]))


@pytest.mark.parametrize("mode", ["exit", "full", "lossless"])
def test_a_prompt_that_is_read_in_parts(engine: Engine, mode: str) -> None:
    threshold = {"threshold": 0.5, "min_layers": 0} if mode == "exit" else {}
    expected = [engine.generate(TEXT[:count], mode=mode, **threshold, **OPTIONS).tokens for count in (120, 7, 64)]
    scheduler = engine.scheduler(SchedulerLimits(slots=2, prompt_tokens=16))
    handles = [scheduler.submit(TEXT[:count], mode=mode, **threshold, **OPTIONS) for count in (120, 7, 64)]
    assert [handle.result().tokens for handle in handles] == expected


def test_long_drafts_stay_within_the_log(engine: Engine) -> None:
    """Texts that repeat themselves, so that prompt lookup drafts as much as it may, and is wrong in the end."""
    repeated = (TEXT[:23] * 5)[:100]
    full = engine.generate(repeated, mode="full", **OPTIONS)
    options = OPTIONS | {"prompt_lookup": 200, "max_pending": 200, "threshold": 0.0}
    found = engine.generate(repeated, mode="lossless", **options)
    assert found.tokens == full.tokens
    assert found.stats.drafted > found.stats.accepted


def test_a_server_caches_prefixes(engine: Engine) -> None:
    size = default_prefix_cache_bytes(engine)
    assert size == 2**28
    scheduler = engine.scheduler(SchedulerLimits(prefix_cache_bytes=size))
    for cached in (0, 112):
        handle = scheduler.submit(TEXT, mode="full", **OPTIONS)
        assert handle.result().tokens == engine.generate(TEXT, mode="full", **OPTIONS).tokens
        assert handle.cached_tokens == cached


@pytest.mark.parametrize("family", tiers.exhaustive_beyond(1, ["lfm2", FAMILY]))
def test_layers_in_four_bits(family: str, tmp_path: Path) -> None:
    """The export compares the graph with the model of those weights; lossless is full depth, alone and in lists.

    Activations are floats: where they have 8 bits too, this random model makes each rounding many times larger.
    """
    source = build(family)
    source.model.save_pretrained(tmp_path / "model")
    routers = random_routers(source, CHECKPOINTS, TEXT[:40], bottleneck=16)
    routers.save(tmp_path / "routers.safetensors")
    files = {"routers": tmp_path / "routers.safetensors", "config": TideConfig(min_layers=1)}
    export(str(tmp_path / "model"), tmp_path / "int4", weights="int4", accuracy_level=1, max_length=256, **files)
    engine = load(tmp_path / "int4", threads=1)
    prompts, options = [TEXT[:50], TEXT[7:10]], OPTIONS | {"temperature": 0.7, "seed": [3, 4]}
    full = engine.generate(prompts, mode="full", **options)
    drafting = {"prompt_lookup": 4, "max_pending": 4, "threshold": 0.0}
    found = engine.generate(prompts, mode="lossless", **drafting, **options)
    assert [one.tokens for one in found] == [one.tokens for one in full]
    alone = engine.generate(prompts[0], mode="lossless", **drafting, **OPTIONS, temperature=0.7, seed=3)
    assert alone.tokens == full[0].tokens
    assert alone.stats.drafted > alone.stats.accepted


def test_what_such_a_model_cannot_be_exported_for(tmp_path: Path) -> None:
    build(FAMILY).model.save_pretrained(tmp_path / "model")
    model, output = str(tmp_path / "model"), tmp_path / "out"
    with pytest.raises(
        UnsupportedModelError, match="keeps recurrent states, which the networks of tensorrt cannot take back"
    ):
        export(model, output, targets=("onnxruntime", "tensorrt"), engines=False)
    assert not output.exists()
