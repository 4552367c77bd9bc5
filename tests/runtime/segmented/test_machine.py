"""The state machine over segment networks against the branched graph, step by step: the same in all."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_cudart import FakeCudart
from overflowing import overflow_slot

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load

LENGTH = 200


@pytest.fixture(scope="module")
def branched(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1, verify=False)


@pytest.fixture(scope="module")
def thresholds(branched: Engine, demo_text_ids: list[int]) -> list[float]:
    """Medians of the scores on the text, so that every checkpoint takes part."""
    state = branched.start([1.0] * 3)
    scores = [state.step([token]).scores.copy() for token in demo_text_ids[:LENGTH]]
    return np.median(scores, axis=0).tolist()


def compare(one: Engine, other: Engine, steps: list[list[int]], thresholds: list[float], max_pending: int) -> set[int]:
    """Feeds the same tokens to both and compares everything after every step; the layers tokens left at."""
    first, second = one.start(thresholds, max_pending), other.start(thresholds, max_pending)
    exits = set()
    for ids in steps:
        a, b = first.step(ids), second.step(ids)
        np.testing.assert_allclose(b.logits, a.logits, atol=1e-3)
        np.testing.assert_allclose(b.scores, a.scores, atol=1e-5)
        assert (b.exit_layer, b.segments_run) == (a.exit_layer, a.segments_run)
        assert second.lengths == first.lengths
        assert second.pending == first.pending
        exits.add(a.exit_layer)
    return exits


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token] for token in ids[:LENGTH]]


@pytest.mark.parametrize("max_pending", [0, 4, 1000])
def test_every_length_to_200_is_the_branched_graph_s(branched, segmented, demo_text_ids, thresholds, max_pending):
    exits = compare(branched, segmented, one_by_one(demo_text_ids), thresholds, max_pending)
    assert exits >= {3, 6, 9, 12}


@pytest.mark.parametrize("max_pending", [1, 4, 10])
def test_a_recording_device_gives_the_same(branched, on_fake_gpu, fake, demo_text_ids, thresholds, max_pending):
    """Memory that is NaN until it is set, work done late, graphs replayed with the addresses they were made with."""
    steps = [*one_by_one(demo_text_ids[:60]), demo_text_ids[60:83], *one_by_one(demo_text_ids[83:120])]
    assert compare(branched, on_fake_gpu, steps, thresholds, max_pending) >= {3, 6, 12}
    assert fake.launches > len(steps)
    assert len(fake.graphs) < 30, "one per network and number of tokens, not one per step"


def test_generation_and_its_statistics_are_the_same(branched, segmented, demo_text_ids) -> None:
    for options in (
        {},
        {"mode": "full"},
        {"threshold": 0.5, "max_pending": 2},
        {"temperature": 0.8, "seed": 3},
        {"mode": "lossless"},
    ):
        a = branched.generate(demo_text_ids[:30], max_new_tokens=24, **options)
        b = segmented.generate(demo_text_ids[:30], max_new_tokens=24, **options)
        assert b.tokens == a.tokens
        assert (b.stats.exit_layer, b.stats.layers_run) == (a.stats.exit_layer, a.stats.layers_run)
        assert b.stats.layer_tokens_run == a.stats.layer_tokens_run


def test_buffers_are_used_again_by_the_next_sequence_and_by_no_other(segmented, backend, demo_text_ids) -> None:
    alone = segmented.generate(demo_text_ids[:20], max_new_tokens=12, threshold=0.5).tokens
    gc.collect()
    free = len(backend._idle)
    first, second = segmented.start([0.5] * 3), segmented.start([0.5] * 3)
    assert first._buffers is not second._buffers
    first.step(demo_text_ids[100:150])  # leaves its K/V in the buffers
    buffers = first._buffers
    del first
    gc.collect()
    assert buffers in backend._idle
    assert len(backend._idle) >= free - 1
    results: dict[int, list[int]] = {}

    def work(number: int) -> None:
        results[number] = segmented.generate(demo_text_ids[:20], max_new_tokens=12, threshold=0.5).tokens

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [alone] * 4


@pytest.mark.parametrize("device", ["segmented", "on_fake_gpu"])
def test_nothing_of_a_sequence_reaches_the_next_not_even_nan(request, device: str, demo_text_ids) -> None:
    """What a model leaves that overflows: in K/V, in what waits, in what is padded with."""
    engine: Engine = request.getfixturevalue(device)
    options = {"threshold": [0.3, 0.5, 0.7], "min_layers": 0, "max_pending": 3}
    alone = engine.generate(demo_text_ids[:20], max_new_tokens=12, **options).tokens
    overflown = engine.start([0.5] * 3)
    for count in (50, 5, 1):
        overflown.step(demo_text_ids[100 : 100 + count])
    buffers = overflown._buffers
    overflow_slot(buffers, 0)
    del overflown
    gc.collect()
    following = engine.start([-1.0] * 3, max_pending=8)
    assert following._buffers is buffers
    for token in demo_text_ids[:2]:
        following.step([token])
    assert np.isfinite(following.step([7], full=True).logits).all()  # over three tokens, padded to four
    del following
    gc.collect()
    assert engine.generate(demo_text_ids[:20], max_new_tokens=12, **options).tokens == alone


def test_the_context_is_the_end_and_a_failed_step_changes_nothing(segmented, demo_text_ids) -> None:
    state = segmented.start([0.5] * 3, max_pending=4)
    state.step(demo_text_ids[:7])
    before = list(state.lengths)
    with pytest.raises(GenerationError, match="the sequence would have 1025 tokens but the model's context holds 1024"):
        state.step([1] * 1018)
    with pytest.raises(GenerationError, match="at least one token"):
        state.step([])
    assert state.lengths == before


def test_a_prompt_of_all_the_context_runs_and_the_last_token_is_right(branched, segmented, demo_text_ids, thresholds):
    """Longer than what may wait, and so near the end of the buffers that nothing may be padded."""
    ids = [*demo_text_ids, *demo_text_ids[:23]]
    assert len(ids) == 1023
    assert compare(branched, segmented, [ids, [5]], thresholds, 16) <= {3, 6, 9, 12}


def test_too_little_memory_is_one_sentence(on_fake_gpu: Engine, fake: FakeCudart) -> None:
    fake.limit = 1 << 20
    with pytest.raises(GenerationError, match="the GPU has not enough free memory for the sequence's buffers"):
        on_fake_gpu.start([0.5] * 3)
