"""What decoders request of a step, and what a generation adds up of their tokens; without a model."""

from collections.abc import Collection, Sequence

import numpy as np

from tide_export.runtime.decoding.decoder import OneByOne, Token
from tide_export.runtime.decoding.generation import Progress
from tide_export.runtime.decoding.lossless import DraftLimits, LosslessDecoder
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.engine import Engine
from tide_export.runtime.sequence import SequenceState, StepResult


def requests(
    drafts: Sequence[int], stop: Collection[int] = (), context: int | None = None, max_drafts: int = 5, tokens: int = 9
) -> list[tuple[list[int], int, bool]]:
    """The requests of a block after 3 tokens, in which these drafts exit early."""
    state = SequenceState(2)
    state.lengths = [3, 3]
    decoder = LosslessDecoder(state, Sampler(), (2, 4), DraftLimits(max_drafts, 0), frozenset(stop), context)
    block = decoder.block([9], tokens)
    seen = [next(block)]
    for draft in drafts:
        state.lengths = [state.length + 1, 3]
        logits = np.eye(10)[draft]
        seen.append(block.send(StepResult(logits, logits[None], exit_layer=2, segments_run=1)))
    return [(list(one.ids), one.logits_to_keep, one.full) for one in seen]


def test_drafts_are_verified_when_enough_are_pending() -> None:
    assert requests([1, 2], max_drafts=2) == [([9], 1, False), ([1], 2, False), ([2], 3, True)]
    assert requests([], max_drafts=0) == [([9], 1, True)]


def test_no_draft_is_made_that_could_not_be_returned() -> None:
    assert requests([1, 2], tokens=3) == [([9], 1, False), ([1], 2, False), ([2], 3, True)]
    assert requests([1, 7], stop={7}) == [([9], 1, False), ([1], 2, False), ([7], 3, True)]
    assert requests([1, 2], context=6) == [([9], 1, False), ([1], 2, False), ([2], 3, True)]


def test_seconds_of_the_prompt_and_of_what_follows(tiny_engine: Engine) -> None:
    progress, decoder = Progress(tiny_engine.manifest, np.array([1, 2]), 9, frozenset()), OneByOne(Sampler(), (2, 4, 6))
    for number, seconds in enumerate([0.5, 0.25, 0.125]):
        progress.take([Token(7, 6, 6)], decoder, [2 + number] * 3, seconds)
    assert (progress.stats.prefill_seconds, progress.stats.decode_seconds) == (0.5, 0.375)
