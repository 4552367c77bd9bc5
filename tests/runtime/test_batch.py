"""Several sequences that are stepped by hand: what each segment runs over, thresholds as the graph compares them, and
what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine
from tide_export.runtime.stepping import NO_LIMIT, Batch
from tide_export.thresholds.resolve import NEVER_EXIT

NEVER, ALWAYS = [NEVER_EXIT] * 2, [-1.0] * 2
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_who_goes_deep_alone_and_who_comes_along(engine: Engine, share: float) -> None:
    """Below the compaction threshold only those run a segment that need it; else all of the step catch up in it."""
    batch = engine.start_batch(share, 4)
    slots = [batch.join(ALWAYS, 1 if number == 0 else 16) for number in range(4)]
    batch.step(dict(zip(slots, PROMPTS, strict=True)), full=slots)
    batch.step({slot: [5] for slot in slots[:2]})
    assert [batch.sequences[slot].pending for slot in slots] == [[1, 0], [1, 0], [0, 0], [0, 0]]
    results = batch.step({slots[0]: [6], slots[2]: [7], slots[3]: [8]})  # of the first two would be pending
    ran = [batch.sequences[slot].pending == [0, 0] for slot in slots]
    assert ran == ([True, False, True, True] if share == 0.0 else [True, False, False, False])
    assert {result.exit_layer for result in results.values()} == {engine.manifest.checkpoints[0]}
    idle = batch.sequences[slots[1]]
    assert idle.lengths == [2, 1, 1], "it was not in the step"


def test_a_threshold_that_float32_rounds_to_the_score_lets_nothing_exit(engine: Engine) -> None:
    """As on the graph of one sequence."""
    ids = [5, 6, 7]
    score = engine.start([1.0, NEVER_EXIT]).step(ids).scores[0]
    for threshold, exits in [
        (np.nextafter(np.float64(score), 0), False),
        (float(np.nextafter(score, np.float32(0))), True),
    ]:
        assert (engine.start([float(threshold), NEVER_EXIT]).step(ids).segments_run == 1) == exits
        batch = engine.start_batch(1.0, 2)
        slot, other = batch.join([float(threshold), NEVER_EXIT], NO_LIMIT), batch.join(NEVER, NO_LIMIT)
        assert (batch.step({slot: ids, other: [9]})[slot].segments_run == 1) == exits


def test_logits_are_the_same_to_the_bit_while_others_come_and_go(tiny_llama: TinyLlama) -> None:
    """On the step graph and on the networks, with steps over one token and over several."""
    engine = tiny_llama.graph(tiny_llama.exact)
    batch, alone = engine.start_batch(1.0, 3), engine.start([0.5, 0.5], 4)
    slot = batch.join([0.5, 0.5], 4)
    for start in range(0, 250, 10):
        ids = [(7 * i) % 500 for i in range(start, start + 10)]
        parts = [ids] if start % 20 else [[token] for token in ids]
        other = batch.join(NEVER, 4) if start % 30 == 0 else None
        for part in parts:
            new = {slot: part} if other is None else {slot: part, other: [3, 4]}
            found, expected = batch.step(new)[slot], alone.step(part)
            np.testing.assert_array_equal(found.logits, expected.logits)
            assert found.exit_layer == expected.exit_layer
        if other is not None:
            batch.leave(other)
    assert batch.sequences[slot].length == 250
    assert batch.free_slots == 2


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda batch, slot: batch.step({slot: []}), "a step needs at least one token"),
        (lambda batch, slot: batch.step({slot: [1, 512]}), "a step holds token id 512, outside the vocabulary"),
        (lambda batch, slot: batch.step({slot: [1] * 300}), "would have 303 tokens but the model's context holds 256"),
        (lambda batch, slot: batch.step({slot: [1], slot + 1: [1]}), r"slot \d of the batch has no sequence"),
        (lambda batch, slot: batch.step({10**6: [1]}), "slot 1000000 of the batch has no sequence"),
        (lambda batch, slot: batch.step({slot: [1]}, {slot: -1}), "logits_to_keep must be a whole number"),
        (lambda batch, slot: batch.leave(slot + 1), "of the batch has no sequence"),
        (lambda batch, slot: batch.sequences[slot].rewind(4), "a sequence of 3 tokens cannot be rewound to 4"),
        (lambda batch, slot: batch.join([0.5], 4), "1 thresholds for 2 checkpoints"),
        (lambda batch, slot: batch.join(NEVER, -1), "max_pending must be a whole number"),
        (lambda batch, slot: [batch.join(NEVER, 4) for _ in range(8)], "the batch has no free slot: let a sequence"),
    ],
)
def test_what_is_refused_changes_nothing(engine: Engine, call: Callable[[Batch, int], Any], sentence: str) -> None:
    batch = engine.start_batch(1.0, 8)
    slot = batch.join(NEVER, 4)
    batch.step({slot: PROMPTS[0]})
    with pytest.raises(GenerationError, match=sentence):
        call(batch, slot)
    found, expected = batch.step({slot: [4]})[slot], engine.start(NEVER).step([*PROMPTS[0], 4])
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [((1.5, 2), r"compaction_threshold must lie in \[0, 1\], not 1.5"), ((1.0, 0), "slots must be a whole number, 1")],
)
def test_a_batch_that_cannot_be_started(engine: Engine, arguments: tuple[float, int], sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        engine.start_batch(*arguments)
