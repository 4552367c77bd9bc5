"""Several sequences on segment networks: each gets, step by step, what it gets alone, on the host and on a fake GPU."""

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from batch_prompts import PROMPTS, TEXT
from fake_cudart import FakeCudart
from overflowing import overflow_slot
from tiny_configs import CHECKPOINTS, LAYERS

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits
from tide_export.runtime.segmented.memory import SegmentBuffers
from tide_export.runtime.sequence import ExitRule
from tide_export.thresholds.resolve import NEVER_EXIT

NEW_TOKENS = 24
PLACES = 3


def one_by_one(engine: Engine, prompts: list[list[int]], **options) -> list:
    return [
        engine.generate(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=[], min_layers=0, **options)
        for prompt in prompts
    ]


def assert_same(together: list, alone: list, passes: bool = True) -> None:
    for one, other in zip(together, alone, strict=True):
        assert (one.tokens, one.finish_reason, one.stats.exit_layer) == (
            other.tokens,
            other.finish_reason,
            other.stats.exit_layer,
        )
        if passes:
            assert one.stats.layers_run == other.stats.layers_run
            assert one.stats.layer_tokens_run == other.stats.layer_tokens_run


@pytest.mark.parametrize("max_pending", [0, 1, 4, 16])
def test_tokens_exits_and_passes_are_those_of_one_by_one(engines, max_pending: int) -> None:
    """Five prompts on three places: as one ends the next takes its place, with K/V of another left in it."""
    graph, networks, thresholds = engines
    options = {"threshold": thresholds, "max_pending": max_pending}
    alone = one_by_one(graph, PROMPTS, **options)
    assert {layers for one in alone for layers in one.stats.exit_layer} == {*CHECKPOINTS, LAYERS}
    for share in (1.0, 0.5, 0.0):
        together = networks.generate(
            PROMPTS, max_new_tokens=NEW_TOKENS, stop_token_ids=[], min_layers=0, compaction_threshold=share, **options
        )
        assert_same(together, alone, passes=share == 1.0)
    if 0 < max_pending < 16:  # whoever could wait came along, so more passes were run
        assert sum(sum(one.stats.layers_run) for one in together) > sum(sum(one.stats.layers_run) for one in alone)


def test_full_depth_and_every_sequence_s_own_random_numbers(engines) -> None:
    graph, networks, thresholds = engines
    full = {"mode": "full", "stop_token_ids": []}
    alone = [graph.generate(prompt, max_new_tokens=NEW_TOKENS, **full) for prompt in PROMPTS]
    assert_same(networks.generate(PROMPTS, max_new_tokens=NEW_TOKENS, **full), alone)
    options = {"threshold": thresholds, "min_layers": 0, "temperature": 0.9, "stop_token_ids": []}
    seeds = [3, 1, 4, 1, 5]
    alone = [
        graph.generate(prompt, max_new_tokens=NEW_TOKENS, seed=n, **options)
        for prompt, n in zip(PROMPTS, seeds, strict=True)
    ]
    assert_same(networks.generate(PROMPTS, max_new_tokens=NEW_TOKENS, seed=seeds, **options), alone)


def test_a_recording_device_gives_the_same(engines, fake_gpu: Engine, fake: FakeCudart, monkeypatch) -> None:
    """Memory that is NaN until it is set, work done late, graphs replayed with the addresses they were made with; and
    room for few graphs, so that they are thrown away and made again."""
    graph, _, thresholds = engines
    for most, max_pending in ((5, 4), (256, 1)):
        monkeypatch.setattr("tide_export.runtime.segmented.cuda.MAX_GRAPHS", most)
        options = {"threshold": thresholds, "max_pending": max_pending}
        before = fake.launches
        together = fake_gpu.generate(PROMPTS, max_new_tokens=NEW_TOKENS, stop_token_ids=[], min_layers=0, **options)
        assert_same(together, one_by_one(graph, PROMPTS, **options))
        assert fake.launches - before > 2 * NEW_TOKENS
        (buffers,) = fake_gpu.backend._idle_batches
        assert len(buffers._device._graphs) <= most
        gc.collect()


def test_the_context_is_the_end_of_one_and_a_failed_step_changes_nothing(engines) -> None:
    graph, networks, thresholds = engines
    context = networks.manifest.model.context_length
    long = [TEXT[i % 40] for i in range(context - 3)]
    prompts = [[5, 6], long, [8]]
    alone = one_by_one(graph, prompts, threshold=thresholds)
    assert [one.finish_reason for one in alone] == ["length", "context", "length"]
    options = {"stop_token_ids": [], "min_layers": 0, "threshold": thresholds}
    assert_same(networks.generate(prompts, max_new_tokens=NEW_TOKENS, **options), alone, passes=False)
    batch = networks.start_batch(1.0, 2)
    first, second = batch.join(thresholds, 4), batch.join(thresholds, 4)
    batch.step({first: [5], second: long})
    before = [list(batch.sequences[place].lengths) for place in (first, second)]
    with pytest.raises(GenerationError, match="the sequence would have 257 tokens but the model's context holds 256"):
        batch.step({first: [6], second: [1, 2, 3, 4]})
    with pytest.raises(GenerationError, match="at least one token"):
        batch.step({first: [6], second: []})
    assert [batch.sequences[place].lengths for place in (first, second)] == before


def test_a_lone_sequence_goes_deep_by_itself_and_those_between_two_come_along(engines, monkeypatch) -> None:
    _, networks, _ = engines
    runs: list[tuple[int, tuple[int, ...]]] = []
    launch = SegmentBuffers._launch
    monkeypatch.setattr(
        SegmentBuffers,
        "_launch",
        lambda buffers, k, index, run, *rest: (runs.append((k, run.active)), launch(buffers, k, index, run, *rest)),
    )
    batch = networks.start_batch(1.0, PLACES)
    places = [batch.join([NEVER_EXIT, NEVER_EXIT], 4) for _ in range(PLACES)]
    batch.step({place: [5] for place in places})
    assert runs == [(0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2))]
    batch._rules = {slot: ExitRule((-1.0, -1.0), 4) for slot in places}  # everyone leaves at the first checkpoint ...
    batch.step({0: [6], 2: [6]})
    batch._rules = {slot: ExitRule((-1.0, -1.0), 1) for slot in places}  # ... but for those of whom two would wait
    for new, deep in (({0: [7], 1: [7]}, (0,)), ({0: [8], 1: [8], 2: [8]}, (1, 2)), ({0: [8], 2: [8]}, (0,))):
        runs.clear()
        batch.step(new)
        assert runs == [(0, tuple(new)), (1, deep), (2, deep)]


def test_more_prompts_than_slots_and_long_ones_in_parts(engines) -> None:
    graph, networks, thresholds = engines
    batch = networks.start_batch(1.0, 2)
    wanted = [*PROMPTS, *PROMPTS[::-1]]
    scheduler = Scheduler(networks.bundle, None, batch, SchedulerLimits(prompt_tokens=20))
    options = {"threshold": thresholds, "max_pending": 4, "min_layers": 0, "stop_token_ids": []}
    handles = [scheduler.submit(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in wanted]
    found = [handle.result() for handle in handles]
    assert_same(found, one_by_one(graph, wanted, threshold=thresholds, max_pending=4))
    assert batch.free_slots == 2
    assert not batch.sequences


def test_buffers_serve_the_next_batch_and_larger_ones_replace_them(engines) -> None:
    _, networks, thresholds = engines
    backend = networks.backend
    backend._idle_batches.clear()
    options = {"threshold": thresholds, "min_layers": 0}
    networks.generate([[5], [6]], max_new_tokens=4, **options)
    gc.collect()
    (small,) = backend._idle_batches
    assert small.slots == 2
    networks.generate([[5], [6], [7]], max_new_tokens=4, **options)
    gc.collect()
    (large,) = backend._idle_batches
    assert large.slots == 3
    networks.generate([[5], [6]], max_new_tokens=4, **options)
    gc.collect()
    assert backend._idle_batches == [large]


@pytest.mark.parametrize("device", ["host", "fake_gpu"])
def test_nothing_of_a_sequence_reaches_the_next_not_even_nan(request, engines, device: str) -> None:
    """What a model leaves that overflows: in K/V, in what waits, in what runs read of places that take no part."""
    _, networks, thresholds = engines
    engine = networks if device == "host" else request.getfixturevalue(device)
    options = {"threshold": thresholds, "min_layers": 0, "max_pending": 3}
    engine.backend._idle_batches.clear()
    alone = engine.generate(PROMPTS[:3], max_new_tokens=NEW_TOKENS, **options)
    gc.collect()
    (buffers,) = engine.backend._idle_batches

    def overflow(places: Sequence[int]) -> None:
        buffers._device.synchronize()
        for place in places:
            overflow_slot(buffers, place)

    assert all(buffers._written)
    overflow(range(buffers.slots))
    batch = engine.start_batch(1.0, 3)
    assert batch._buffers is buffers

    def step(new: dict[int, list[int]], full: Sequence[int] = ()) -> None:
        assert all(np.isfinite(result.logits).all() for result in batch.step(new, full=full).values())

    rule = ([-1.0] * len(thresholds), 8)
    places = [batch.join(*rule) for _ in range(3)]
    step(dict.fromkeys(places, PROMPTS[2]))
    batch.leave(1)
    overflow([1])
    assert batch.join(*rule) == 1
    step({0: [5], 1: [5], 2: [5]})
    step({0: [6], 2: [6]})
    step({0: [7], 2: [7]}, full=(0, 2))  # the place between them has nothing to run, and takes part as padding
    step({1: [8]}, full=(1,))
    assert_same(engine.generate(PROMPTS[:3], max_new_tokens=NEW_TOKENS, **options), alone)


def test_what_is_refused_is_one_sentence(engines, fake_gpu: Engine, fake: FakeCudart) -> None:
    _, networks, _ = engines
    fake.limit = 1 << 18
    with pytest.raises(GenerationError, match="the GPU has not enough free memory for the sequence's buffers"):
        fake_gpu.generate([[5], [6]], max_new_tokens=4)
    backend = networks.backend
    alone = type(backend)(
        networks.manifest, replace(backend._info, max_batch_size=1), backend.specs, backend._open_device, "cpu"
    )
    with pytest.raises(GenerationError, match=r"take one sequence at a time .* or use provider 'cpu'"):
        Engine(networks.bundle, alone).generate([[5], [6]], max_new_tokens=4)
