"""A list of prompts where K/V are propagated: every sequence gets what it gets alone, whatever else is in the batch.
That this is what the rule says, `tests/parity/test_propagate.py` shows."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from bundles import without
from judge import TEXT
from tiny_configs import CHECKPOINTS, LAYERS
from tiny_engines import TinyLlama

from tide_export.bundle.file_names import MANIFEST_FILE, batch_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError, GenerationError
from tide_export.names.networks import skipped_name
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.verify.export_gate import dividing_thresholds

NEW_TOKENS = 16
PROMPTS = [TEXT[:1], TEXT, TEXT[3:20], TEXT[5:7], TEXT[9:30]]


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.propagating)


@pytest.fixture(scope="module")
def mixed(tiny_llama: TinyLlama) -> list[float]:
    return dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)


def alone(engine: Engine, prompts: list[list[int]], **options) -> list[Generation]:
    return [engine.generate(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in prompts]


def same(together: list[Generation], one_by_one: list[Generation]) -> bool:
    def told(one: Generation):
        stats = one.stats
        passes = (stats.exit_layer, stats.layers_run, stats.layer_tokens_run, stats.layer_tokens_total)
        return one.tokens, one.finish_reason, *passes

    return [told(one) for one in together] == [told(one) for one in one_by_one]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_list_is_as_one_by_one(engine: Engine, mixed: list[float], count: int) -> None:
    for options in ({"mode": "full"}, {"threshold": mixed}, {"threshold": 0.0}):
        options |= {"stop_token_ids": []} | ({"min_layers": 0} if "threshold" in options else {})
        expected = alone(engine, PROMPTS[:count], **options)
        assert same(engine.generate(PROMPTS[:count], max_new_tokens=NEW_TOKENS, **options), expected), options
        if count == 5 and options.get("threshold") == mixed:
            exits = {layers for one in expected for layers in one.stats.exit_layer}
            assert exits == {*CHECKPOINTS, LAYERS}, "some leave early, some later, some never"


def test_which_steps_run_every_segment(engine: Engine) -> None:
    """A first step, and one of several tokens; beside them a sequence that leaves as soon as it may."""
    batch = engine.start_batch(1.0, 4)
    states = {batch.join([0.0] * 2, 0): engine.start([0.0] * 2) for _ in range(3)}
    one, two, three = sorted(states)
    for feeds in (
        {one: PROMPTS[1], two: [5]},
        {one: [6], two: [7], three: PROMPTS[0]},
        {one: [8], two: [9, 10, 11], three: [12]},
        {two: [13], three: [14]},
        {one: [15], two: [16], three: [17]},
    ):
        results = batch.step(feeds)
        for place, ids in feeds.items():
            found, expected = results[place], states[place].step(ids)
            whole = len(ids) > 1 or states[place].length == 1
            assert found.exit_layer == expected.exit_layer == (LAYERS if whole else CHECKPOINTS[0])
            assert found.segments_run == expected.segments_run
            assert np.abs(found.logits - expected.logits).max() < 1e-4
            assert batch.sequences[place].computed == states[place].computed
            assert batch.sequences[place].lengths == states[place].lengths


def test_there_is_nothing_to_choose(engine: Engine) -> None:
    for name, value in (("compaction_threshold", 0.5), ("max_pending", 4)):
        with pytest.raises(GenerationError, match=f"{name} is for an exact K/V cache: .* propagates, so that nothing"):
            engine.generate([[5], [6]], max_new_tokens=2, **{name: value})
    with pytest.raises(GenerationError, match="max_pending is for an exact K/V cache"):
        engine.stream([5], max_new_tokens=2, max_pending=4)
    with pytest.raises(GenerationError, match="propagates"):
        engine.generate([[5], [6]], max_new_tokens=2, mode="lossless")


def test_networks_that_are_missing_or_others(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    bundle = tiny_llama.propagating
    old = load(without(bundle, tmp_path / "old", "batch/"), threads=1)
    assert len(old.generate([5], max_new_tokens=2).tokens) == 2
    with pytest.raises(GenerationError, match="holds no networks for batches"):
        old.generate([[5], [6]], max_new_tokens=2)
    folder, wrong = tmp_path / "mixed", batch_file(skipped_name(1))
    without(bundle, folder, wrong)
    shutil.copyfile(bundle / batch_file(skipped_name(2)), folder / wrong)
    write_manifest(folder, Manifest.from_json((folder / MANIFEST_FILE).read_text()))
    with pytest.raises(BundleError, match="batch/skipped_01"):
        load(folder, threads=1).generate([[5], [6]], max_new_tokens=2)
