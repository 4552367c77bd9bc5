"""What decoders request of a step, and what a generation adds up of their tokens; without a model."""

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from tide_export.runtime.decoding.decoder import OneByOne, Token, run_block
from tide_export.runtime.generation import Progress
from tide_export.runtime.decoding.lossless import DraftLimits, LosslessDecoder
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.engine import Engine
from tide_export.runtime.sequence import SequenceState, StepResult

FREE = (0.0,) * 5  # costs of verifying drafts


def requests(
    drafts: Sequence[int], stop: Collection[int] = (), context: int | None = None, max_drafts: int = 5, tokens: int = 9
) -> list[tuple[list[int], int, bool]]:
    """The requests of a block after 3 tokens, in which these drafts exit early."""
    state = SequenceState(2)
    state.lengths = [3, 3]
    decoder = LosslessDecoder(
        state, Sampler(), (2, 4), DraftLimits(max_drafts, 0, (0.0,), FREE), frozenset(stop), context
    )
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


class Reader:
    """Reads blocks of a decoder that drafts by prompt lookup alone, of tokens that the full model is said to choose."""

    def __init__(self, stop: Collection[int] = (), costs: tuple[float, ...] = FREE) -> None:
        self._state = SequenceState(2)
        self._decoder = LosslessDecoder(
            self._state, Sampler(), (2, 4), DraftLimits(0, 4, (), costs), frozenset(stop), None
        )

    def read(self, ids: list[int], chosen: list[int]) -> tuple[list[int], list[Token], int]:
        """The ids that a block requests, its tokens, and the length of the sequence after it. After the tokens of
        `chosen` its last is chosen again."""
        requested: list[int] = []

        def step(ids: list[int], logits_to_keep: int, full: bool) -> StepResult:
            requested.extend(ids)
            assert full
            self._state.lengths = [self._state.length + len(ids)] * 2
            logits = np.eye(10)[(chosen + chosen[-1:] * 9)[:logits_to_keep]]
            return StepResult(logits[-1], logits, exit_layer=4, segments_run=2)

        tokens = run_block(self._decoder.block(ids, 9), step)
        return requested, tokens, self._state.length


def test_an_ngram_draft_costs_nothing() -> None:
    reader = Reader()
    assert reader.read([1, 2, 3, 1], [2]) == ([1, 2, 3, 1], [Token(2, 4, 4)], 4)
    assert reader.read([2], [3, 1, 0]) == ([2, 3, 1, 2, 3], [Token(3, 0, 0), Token(1, 0, 0), Token(0, 4, 4)], 7)


def test_an_ngram_draft_is_as_long_as_it_is_expected_to_pay() -> None:
    """After one token that matches 17 % of drafts are accepted, after two 42 %, after three 54 %."""
    for costs, length in [((0.1, 0.1, 0.1, 0.1, 0.1), 4), ((0.1, 0.17, 0.3, 0.5, 1.0), 1), ((0.13,) * 5, 0)]:
        reader = Reader(costs=costs)
        reader.read([1, 2, 3, 4, 5], [2])
        assert len(reader.read([2], [0])[0]) == 1 + length


def test_what_is_always_rejected_is_drafted_no_more() -> None:
    reader = Reader(costs=(0.1,) * 5)
    reader.read(list(range(10)), [5])
    lengths = []
    for token, following in pairwise([5, 3, 8, 1, 6, 4, 7, 2, 5]):
        lengths.append(len(reader.read([token], [following])[0]))
    assert lengths[0] == 5
    assert lengths[-3:] == [1, 1, 1]


class Exits:
    """Counts the drafts of a decoder whose steps all exit if they may, to a token that is accepted or not."""

    def __init__(self, draft_cost: float) -> None:
        self._state = SequenceState(2)
        self._state.lengths = [3, 3]
        limits = DraftLimits(8, 0, (draft_cost,), FREE)
        self._decoder = LosslessDecoder(self._state, Sampler(), (2, 4), limits, frozenset(), None)

    def drafted(self, accepted: bool) -> int:
        """How many drafts the next block makes."""

        def step(ids: list[int], logits_to_keep: int, full: bool) -> StepResult:
            total = self._state.length + len(ids)
            self._state.lengths = [total, total if full else self._state.lengths[1]]
            logits = np.eye(10)[[7] * logits_to_keep] if full else np.eye(10)[[7 if accepted else 6]]
            return StepResult(logits[-1], logits, *((4, 2) if full else (2, 1)))

        before = self._decoder.drafted
        tokens = run_block(self._decoder.block([7], 50), step)
        assert {token.id for token in tokens} == {7}
        return self._decoder.drafted - before


def test_early_exits_that_are_rejected_are_given_up_and_tried_again_later() -> None:
    """Half a step may be lost at first, and a hundredth of a step with each token."""
    exits = Exits(draft_cost=0.4)
    assert [exits.drafted(accepted=False) for _ in range(4)] == [2, 0, 0, 0]
    assert sum(exits.drafted(accepted=False) for _ in range(100)) == 2
    exits = Exits(draft_cost=0.9)
    assert sum(exits.drafted(accepted=False) for _ in range(200)) == 3


def test_more_early_exits_are_pending_where_they_gain() -> None:
    exits = Exits(draft_cost=0.4)
    assert [exits.drafted(accepted=True) for _ in range(4)] == [2, 5, 8, 8]
    assert Exits(draft_cost=0.0).drafted(accepted=True) == 8


def test_an_ngram_draft_ends_with_a_stop_token() -> None:
    reader = Reader(stop={1})
    reader.read([1, 2, 3, 1], [2])
    assert reader.read([2], [3, 1, 5]) == ([2, 3, 1], [Token(3, 0, 0), Token(1, 0, 0), Token(5, 4, 4)], 7)


def test_seconds_of_the_prompt_and_of_what_follows(tiny_engine: Engine) -> None:
    progress, decoder = Progress(tiny_engine.manifest, np.array([1, 2]), 9, frozenset()), OneByOne(Sampler(), (2, 4, 6))
    for number, seconds in enumerate([0.5, 0.25, 0.125]):
        progress.take([Token(7, 6, 6)], decoder, [2 + number] * 3, seconds)
    assert (progress.stats.prefill_seconds, progress.stats.decode_seconds) == (0.5, 0.375)


def test_the_context_is_full_when_the_first_segment_has_computed_it(tiny_engine: Engine) -> None:
    progress, decoder = Progress(tiny_engine.manifest, np.array([1, 2]), 9, frozenset()), OneByOne(Sampler(), (2, 4, 6))
    decoder.undone = 3
    assert progress.take([Token(7, 2, 4), Token(8, 6, 6)], decoder, [256, 200, 100], 0.5) == [7, 8]
    assert progress.finish_reason == "context"
    stats = progress.stats
    assert (stats.exit_layer, stats.layers_run) == ([2, 6], [4, 6])
    assert stats.layer_tokens_run == 2 * (256 + 200 + 100) + 6 * 3
    assert stats.layer_tokens_total == 6 * 256


def test_a_draft_is_accepted_where_the_full_model_draws_it_with_the_same_random_numbers() -> None:
    state, logits = SequenceState(2), np.linspace(0, 12, 10)
    state.lengths = [3, 3]
    decoder = LosslessDecoder(state, Sampler(1.0, seed=0), (2, 4), DraftLimits(4, 0, (0.0,), FREE), frozenset(), None)

    def step(ids: list[int], logits_to_keep: int, full: bool) -> StepResult:
        total = state.length + len(ids)
        state.lengths = [total, total if full else 3]
        exit_layer, segments_run = (4, 2) if full else (2, 1)
        return StepResult(logits, np.tile(logits, (logits_to_keep, 1)), exit_layer, segments_run)

    full = Sampler(1.0, seed=0)
    drawn = [full(logits) for _ in range(5)]
    accepted = next(number for number, token in enumerate(drawn) if token != 9)  # 9 is the most likely
    tokens = run_block(decoder.block([9], 9), step)
    assert [token.id for token in tokens] == drawn[: accepted + 1]
    assert 0 < accepted < 4
    assert (decoder.drafted, decoder.accepted, decoder.undone) == (4, accepted, 4 - accepted)
