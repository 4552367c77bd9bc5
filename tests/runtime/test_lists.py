"""A list of prompts on the demo model: every sequence gets what it gets alone, whatever else is in the batch."""

from pathlib import Path

import numpy as np
import pytest
from bundles import without
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.runtime.scheduler import SchedulerLimits

CHECKPOINTS = (3, 6, 9)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Engine:
    return load(demo_bundle, threads=1)


def alone(engine: Engine, prompts: list[list[int]], **options) -> list[Generation]:
    depth = {} if options.get("mode") == "full" else {"min_layers": 0}
    return [engine.generate(prompt, max_new_tokens=NEW_TOKENS, **depth, **options) for prompt in prompts]


def same(together: list[Generation], one_by_one: list[Generation]) -> bool:
    assert len(together) == len(one_by_one)
    return all(
        (a.tokens, a.finish_reason, a.stats.exit_layer) == (b.tokens, b.finish_reason, b.stats.exit_layer)
        for a, b in zip(together, one_by_one, strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_full_depth_is_that_of_one_by_one(engine: Engine, prompts: list[list[int]], count: int) -> None:
    together = engine.generate(prompts[:count], max_new_tokens=NEW_TOKENS, mode="full")
    expected = alone(engine, prompts[:count], mode="full")
    assert same(together, expected)
    assert [one.stats.layers_run for one in together] == [one.stats.layers_run for one in expected]


@pytest.mark.parametrize("max_pending", [1, 4])
def test_exits_are_those_of_one_by_one(
    engine: Engine, prompts: list[list[int]], mixed: list[float], max_pending: int
) -> None:
    options = {"threshold": mixed, "max_pending": max_pending, "stop_token_ids": []}
    expected = alone(engine, prompts, **options)
    exits = {layers for one in expected for layers in one.stats.exit_layer}
    assert exits > {3, 12}, "some leave early, some later, some never"
    apart = engine.generate(prompts, max_new_tokens=NEW_TOKENS, min_layers=0, compaction_threshold=1.0, **options)
    assert same(apart, expected)
    for one, other in zip(apart, expected, strict=True):
        assert one.stats.layers_run == other.stats.layers_run
        assert one.stats.layer_tokens_run == other.stats.layer_tokens_run
        assert one.stats.layer_tokens_total == other.stats.layer_tokens_total
    for share in (0.0, 0.5):
        along = engine.generate(prompts, max_new_tokens=NEW_TOKENS, min_layers=0, compaction_threshold=share, **options)
        assert same(along, expected)
    # Whoever could wait caught up along, so more passes were run.
    along = engine.generate(prompts, max_new_tokens=NEW_TOKENS, min_layers=0, compaction_threshold=0.0, **options)
    assert sum(sum(one.stats.layers_run) for one in along) > sum(sum(one.stats.layers_run) for one in apart)


def test_every_sequence_draws_from_its_own_seed(engine: Engine, prompts: list[list[int]], mixed: list[float]) -> None:
    options = {"threshold": mixed, "temperature": 0.9, "top_p": 0.95}
    assert same(
        engine.generate(prompts, max_new_tokens=NEW_TOKENS, min_layers=0, seed=7, **options),
        alone(engine, prompts, seed=7, **options),
    )
    seeds = [3, 1, 4, 1, 5]
    together = engine.generate(prompts, max_new_tokens=NEW_TOKENS, min_layers=0, seed=seeds, **options)
    pairs = zip(prompts, seeds, strict=True)
    assert same(together, [alone(engine, [prompt], seed=seed, **options)[0] for prompt, seed in pairs])


def test_sequences_end_one_by_one(engine: Engine, prompts: list[list[int]]) -> None:
    tokens = [one.tokens for one in alone(engine, prompts, mode="full", stop_token_ids=[])]
    stops = [tokens[0][2], tokens[3][7]]
    together = engine.generate(prompts, max_new_tokens=NEW_TOKENS, mode="full", stop_token_ids=stops)
    assert same(together, alone(engine, prompts, mode="full", stop_token_ids=stops))
    assert len({len(one.tokens) for one in together}) > 1
    assert "stop" in {one.finish_reason for one in together}


def test_more_prompts_than_slots(engine: Engine, prompts: list[list[int]], mixed: list[float]) -> None:
    """As a sequence ends the next takes its slot; and long prompts are read in parts."""
    wanted = prompts + prompts[::-1]
    stop = alone(engine, prompts[:1], threshold=mixed, max_pending=4, stop_token_ids=[])[0].tokens[3:5]
    options = {"threshold": mixed, "max_pending": 4, "stop_token_ids": stop}
    scheduler = engine.scheduler(SchedulerLimits(slots=4, prompt_tokens=60), 1.0)
    handles = [scheduler.submit(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in wanted]
    assert same([handle.result() for handle in handles], alone(engine, wanted, **options))
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_the_context_s_end(engine: Engine, demo_text_ids: list[int]) -> None:
    context = engine.manifest.model.context_length
    assert context is not None
    long = (demo_text_ids * (1 + context // len(demo_text_ids)))[: context - 3]
    short = demo_text_ids[:5]
    one, other = engine.generate([long, short], max_new_tokens=8, mode="full", stop_token_ids=[])
    assert (len(one.tokens), one.finish_reason) == (4, "context")
    assert (len(other.tokens), other.finish_reason) == (8, "length")
    assert one.tokens == engine.generate(long, max_new_tokens=8, mode="full", stop_token_ids=[]).tokens


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([[1], []], {}, "prompt 2 is empty"),
        ([[1], [10**7]], {}, "prompt 2 holds token id"),
        ([[1], 2], {}, "prompt 2 must be a flat list"),
        ([[1], [2]], {"prompt_lookup": 3}, "prompt_lookup is for mode 'lossless'"),
        ([[1], [2]], {"mode": "lossless", "prompt_lookup": -1}, "prompt_lookup must be"),
        ([[1], [2]], {"seed": [1]}, "1 seeds for 2 prompts"),
        ([[1], [2]], {"seed": [1, -1]}, "seed must be"),
        ([[1], [2]], {"compaction_threshold": 1.5}, "compaction_threshold must lie"),
        ([[1], [2]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1, 2], {"compaction_threshold": 0.5}, "compaction_threshold is for a list"),
    ],
)
def test_what_is_refused(engine: Engine, prompts: list, options: dict, says: str) -> None:
    with pytest.raises(GenerationError, match=says):
        engine.generate(prompts, **options)


def test_an_array_of_prompts(engine: Engine) -> None:
    found = engine.generate(np.array([[5, 6], [7, 8]]), max_new_tokens=3, mode="full")
    assert same(
        found,
        [
            engine.generate([5, 6], max_new_tokens=3, mode="full"),
            engine.generate([7, 8], max_new_tokens=3, mode="full"),
        ],
    )


def test_a_bundle_without_networks_for_batches(demo_bundle: Path, tmp_path: Path) -> None:
    engine = load(without(demo_bundle, tmp_path / "old", "batch/"), threads=1)
    assert len(engine.generate([5], max_new_tokens=2).tokens) == 2
    with pytest.raises(GenerationError, match="holds no networks for batches"):
        engine.generate([[5], [6]], max_new_tokens=2)


def test_a_propagating_bundle_takes_no_drafts(tiny_llama: TinyLlama) -> None:
    with pytest.raises(GenerationError, match="propagates"):
        tiny_llama.graph(tiny_llama.propagating).generate([[5], [6]], max_new_tokens=2, mode="lossless")
