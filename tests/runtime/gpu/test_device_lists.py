"""Lists of prompts and requests, on the graph's networks for batches and on segment networks, on the host and on the
stand-in GPU: each sequence has the tokens and exits that it has alone on the graph, and runs of segment networks are
planned as cpp/src/segmented/run_plan.h says."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import with_manifest
from caller_networks import CallersNetworks, Run, callers_engine
from fake_cudart import FakeCudart
from generations import NEW_TOKENS, PROMPTS, alone, exits, facts, together, tokens_of
from judge import TEXT
from test_device_sequences import OVERFLOWING, overflow
from tiny_configs import CHECKPOINTS, CONTEXT, LAYERS
from tiny_engines import TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError
from tide_export.names.networks import segment_name
from tide_export.runtime.engine import Engine, open_engine
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT

SLOTS = 3


@pytest.mark.parametrize("max_pending", [0, 1, 4, 16])
def test_tokens_and_exits_are_those_of_each_prompt_alone(
    graph: Engine, batching: Engine, thresholds: list[float], max_pending: int
) -> None:
    """Five prompts in three slots: as one ends the next takes its place, with K/V of another left in it."""
    options = {"threshold": thresholds, "max_pending": max_pending, "min_layers": 0}
    expected = alone(graph, **options)
    assert {layers for one in expected for layers in one.stats.exit_layer} == {*CHECKPOINTS, LAYERS}
    for share in (1.0, 0.5, 0.0):
        found = together(batching, compaction_threshold=share, **options)
        assert [exits(one) for one in found] == [exits(one) for one in expected]
        if share == 1.0:
            assert [facts(one) for one in found] == [facts(one) for one in expected]
    if 0 < max_pending < 16:  # those that could wait came along, so more was run
        assert sum(sum(one.stats.layers_run) for one in found) > sum(sum(one.stats.layers_run) for one in expected)


@pytest.mark.parametrize(
    "options", [{"mode": "full"}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 40}], ids=str
)
def test_full_depth_and_random_numbers_of_each(
    graph: Engine, batching: Engine, thresholds: list[float], options: dict[str, Any]
) -> None:
    if "temperature" in options:
        options = options | {"threshold": thresholds, "min_layers": 0, "seed": [3, 1, 4, 1, 5]}
    assert [exits(one) for one in together(batching, **options)] == [exits(one) for one in alone(graph, **options)]


def test_sequences_end_one_by_one(graph: Engine, batching: Engine) -> None:
    tokens = tokens_of(alone(graph, mode="full"))
    options = {"mode": "full", "stop_token_ids": [tokens[0][2], tokens[3][7]]}
    found = together(batching, **options)
    assert [facts(one) for one in found] == [facts(one) for one in alone(graph, **options)]
    assert len({len(one.tokens) for one in found}) > 1
    assert "stop" in {one.finish_reason for one in found}


def test_the_context_is_the_end_of_one(graph: Engine, batching: Engine, thresholds: list[float]) -> None:
    prompts = [[5, 6], [TEXT[i % 40] for i in range(CONTEXT - 3)], [8]]
    expected = alone(graph, prompts, threshold=thresholds, min_layers=0)
    assert [one.finish_reason for one in expected] == ["length", "context", "length"]
    found = together(batching, prompts, threshold=thresholds, min_layers=0)
    assert [exits(one) for one in found] == [exits(one) for one in expected]


def test_requests_that_come_and_go(graph: Engine, batching: Engine, thresholds: list[float]) -> None:
    """In two slots, long prompts in parts, and one request is cancelled."""
    options = {"threshold": thresholds, "max_pending": 4, "min_layers": 0}
    wanted = [*PROMPTS, *PROMPTS[::-1]]
    scheduler = batching.scheduler(SchedulerLimits(slots=2, prompt_tokens=20), 1.0)
    given = options | {"max_new_tokens": NEW_TOKENS, "stop_token_ids": []}
    cancelled, *handles = (scheduler.submit(prompt, **given) for prompt in [TEXT, *wanted])
    scheduler.step()
    cancelled.cancel()
    found = [facts(handle.result()) for handle in handles]
    assert cancelled.result().finish_reason == "cancelled"
    assert found == [facts(one) for one in alone(graph, wanted, **options)]
    assert scheduler.running == 0


def test_lists_in_threads_are_independent(graph: Engine, batching: Engine, thresholds: list[float]) -> None:
    """Lists of several lengths at once, each in buffers of its own."""
    options = {"threshold": thresholds, "min_layers": 0}
    expected = [exits(one) for one in alone(graph, **options)]
    found: dict[int, list[tuple]] = {}

    def work(size: int) -> None:
        found[size] = [exits(one) for one in together(batching, PROMPTS[:size], **options)]

    threads = [threading.Thread(target=work, args=(size,)) for size in (2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {size: expected[:size] for size in (2, 3, 5)}


def test_nothing_of_a_sequence_reaches_the_others_not_even_nan(
    callers: tuple[Engine, CallersNetworks], thresholds: list[float]
) -> None:
    """Nor what has its slot afterwards, nor a slot that takes part as padding."""
    engine, networks = callers
    options = {"threshold": thresholds, "min_layers": 0, "max_pending": 3}
    expected = [exits(one) for one in alone(engine, **options)]
    networks.after = overflow
    scheduler = engine.scheduler(SchedulerLimits(slots=SLOTS), 1.0)
    for _ in range(2):
        submitted = [PROMPTS[0], [OVERFLOWING, *TEXT], *PROMPTS[1:]]
        handles = [scheduler.submit(ids, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **options) for ids in submitted]
        with pytest.raises(GenerationError, match="not finite"):
            handles.pop(1).result()
        assert [exits(handle.result()) for handle in handles] == expected
    del scheduler, handles
    batch = engine.start_batch(1.0, SLOTS)
    slots = [batch.join([ALWAYS_EXIT, ALWAYS_EXIT], 8) for _ in range(SLOTS)]
    batch.step({0: [5], 1: [OVERFLOWING, 4], 2: [5, 6]})
    batch.leave(1)
    for full in ((), (0, 2)):  # the slot between them has nothing to run
        results = batch.step({0: [7], 2: [7]}, full=full)
        assert all(np.isfinite(result.logits).all() for result in results.values())
    assert batch.join([ALWAYS_EXIT, ALWAYS_EXIT], 8) == 1
    assert np.isfinite(batch.step({slot: [8] for slot in slots}, full=slots)[1].logits).all()


# --- which slots run together ----------------------------------------------------------------------------------------


def segments_run(networks: CallersNetworks) -> list[Run]:
    return [run for run in networks.runs if run[0] in (segment_name(k) for k in range(LAYERS))]


@pytest.mark.parametrize(
    ("lengths", "counts", "runs"),
    [
        ([7, 7, 7], {0: 1, 1: 1, 2: 1}, [(1, 3)]),
        ([7, 7, 7], {2: 1}, [(1, 1)]),
        ([7, 7, 7], {0: 1, 2: 3}, [(4, 3)]),  # the slot between them is padding
        ([7, 7, 7], {0: 1, 1: 20, 2: 3}, [(4, 3), (32, 1)]),  # a prompt by itself, last
        ([7, CONTEXT - 1, 7], {0: 1, 1: 1, 2: 4}, [(1, 2), (4, 1)]),  # no room for padding in slot 1
        ([7, CONTEXT - 1, 7], {0: 4, 1: 1, 2: 4}, [(4, 1), (1, 1), (4, 1)]),
        ([7, CONTEXT, 7], {0: 4, 2: 4}, [(4, 1), (4, 1)]),  # nor in one that has nothing to run
        ([7, CONTEXT - 3, 7], {0: 3, 1: 3}, [(3, 2)]),  # no power of two, but together
        ([7, 7, CONTEXT - 1], {0: 4, 1: 1}, [(4, 2)]),  # a full slot after them does not count
        ([CONTEXT - 20, 7, 7], {0: 20}, [(20, 1)]),  # it ends with the buffer
        ([CONTEXT - 32, 7, 7], {0: 20}, [(32, 1)]),
        ([1, 1, 1], {0: 33}, [(33, 1)]),  # no more than the largest run
    ],
)
def test_slots_run_together_where_there_is_room(
    callers: tuple[Engine, CallersNetworks], graph: Engine, lengths: list[int], counts: dict[int, int], runs: list
) -> None:
    """In as few runs as can be; their padding overwrites nothing."""
    (engine, networks), text = callers, [TEXT[i % len(TEXT)] for i in range(CONTEXT)]
    batch = engine.start_batch(1.0, SLOTS)
    for slot in range(SLOTS):
        batch.join([NEVER_EXIT, NEVER_EXIT], 0)
        batch.step({slot: text[: lengths[slot]]})
    networks.runs.clear()
    results = batch.step({slot: text[lengths[slot] : lengths[slot] + count] for slot, count in counts.items()})
    assert segments_run(networks) == [(segment_name(k), *run) for k in range(LAYERS) for run in runs]
    for slot, result in results.items():
        expected = graph.start([NEVER_EXIT, NEVER_EXIT]).step(text[: lengths[slot] + counts[slot]])
        np.testing.assert_allclose(result.logits, expected.logits, atol=2e-4)


def test_a_lone_sequence_goes_deep_by_itself_and_those_between_two_come_along(
    on_host: tuple[Engine, CallersNetworks],
) -> None:
    """Where the host decides."""
    engine, networks = on_host
    batch = engine.start_batch(1.0, SLOTS)
    for _ in range(SLOTS):
        batch.join([ALWAYS_EXIT, ALWAYS_EXIT], 1)
    batch.step({slot: [5] for slot in range(SLOTS)})
    batch.step({0: [6]})  # two tokens would be pending
    networks.runs.clear()
    batch.step({0: [7], 1: [7], 2: [7]})
    assert segments_run(networks) == [("segment_00", 1, 3), ("segment_01", 2, 2), ("segment_02", 2, 2)]
    networks.runs.clear()
    batch.step({0: [8], 2: [8]})
    assert segments_run(networks) == [("segment_00", 1, 3), ("segment_01", 2, 1), ("segment_02", 2, 1)]


# --- memory, and what is refused -------------------------------------------------------------------------------------


def test_larger_buffers_replace_smaller_ones(tiny_llama: TinyLlama, cudart: FakeCudart) -> None:
    """And serve smaller batches from then on, so that two sizes are never held."""
    engine, networks = callers_engine(open_bundle(tiny_llama.exact), cudart)
    full = {"mode": "full", "max_new_tokens": 4}
    together(engine, PROMPTS[:2], **full)
    small = cudart.allocated
    together(engine, PROMPTS[:3], **full)
    large = cudart.allocated
    assert (networks.opened, large > small) == (1, True)
    together(engine, PROMPTS[:2], **full)
    assert (networks.opened, cudart.allocated) == (1, large)


def test_networks_that_take_one_sequence_take_a_list_one_by_one(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    bundle = open_bundle(tiny_llama.exact)
    assert bundle.manifest.networks is not None
    lone = with_manifest(tiny_llama.exact, tmp_path, networks=replace(bundle.manifest.networks, max_batch_size=1))
    engine = open_engine(open_bundle(lone), "cpu-networks", threads=1)
    assert engine.max_batch_size == 1
    assert engine.scheduler().limits.slots == 1
    assert tokens_of(together(engine, PROMPTS[:3])) == tokens_of(alone(tiny_llama.networks(), PROMPTS[:3]))


def test_a_prefix_cache_is_refused(engine: Engine) -> None:
    with pytest.raises(
        GenerationError, match="prefix_cache_bytes is for provider 'cpu': sequences of other providers share no K/V"
    ):
        engine.scheduler(SchedulerLimits(prefix_cache_bytes=1 << 24))
