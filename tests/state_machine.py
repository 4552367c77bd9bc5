"""Random use of sequences and batches, compared with the oracle after every action.

`StepMachine` draws the actions: sequences join, step, are rewound, fail and leave. A `Player` carries each out on all
engines under test, and compares logits, exit layers, scores and counts with what the oracle and the rule of
docs/architecture/lazy-depth.md and docs/guide/several-prompts.md give.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
from fuzz.settings import cases
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from judge import TEXT, Judge, Truth
from stepped_engines import New

from tide_export.errors import GenerationError
from tide_export.runtime.stepping import NO_LIMIT, StepResult
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.parity import UNDECIDED_GAP

SEQUENCES = 3  # at a time
TOLERANCE = 2e-4  # of logits
# What must have happened.
REQUIRED = ("exit after segment 0", "exit after segment 1", "exit after segment 2", "rows 1", "failed", "refused")
REQUIRED += ("rows > 1", "forced", "caught up", "a burst over the most that may be pending", "the whole context")
REQUIRED += ("rewound into pending tokens", "rewound into the cache")
OUTSIDE = 10**6  # a token id outside the vocabulary


class Expected:
    """One sequence: its tokens, its thresholds, and how far each segment must have come.

    Attributes:
        offset: its next token is that of TEXT after so many, plus its length.
    """

    def __init__(self, thresholds: tuple[float, ...], offset: int) -> None:
        self.thresholds, self.offset = thresholds, offset
        self.ids: list[int] = []
        self.lengths = [0] * (len(thresholds) + 1)

    def following(self) -> Iterator[int]:
        """The tokens that follow."""
        return islice(cycle(TEXT), (self.offset + len(self.ids)) % len(TEXT), None)


class Player:
    """Carries out actions and checks each. A sequence keeps its number from `join` to `leave`.

    Attributes:
        seen: how often what the rule knows has happened, so that a test can require it.
    """

    def __init__(
        self,
        judge: Judge,
        engines: Mapping[str, Any],
        context: int,
        batched: bool = False,
        pending_limit: int = NO_LIMIT,
    ) -> None:
        """`pending_limit`: the largest limit of pending tokens that all engines keep to."""
        self.judge, self.engines, self.context = judge, engines, context
        self.batched, self.pending_limit = batched, pending_limit
        self.seen = Counter[str]()

    def begin(self, thresholds: Sequence[float], max_pending: int, compaction_threshold: float) -> None:
        max_pending = min(max_pending, self.pending_limit)
        self.thresholds, self.max_pending = tuple(thresholds), max_pending
        self.compaction = compaction_threshold if self.batched else 1.0
        self.live: dict[int, Expected] = {}
        for engine in self.engines.values():
            engine.begin(thresholds, max_pending, compaction_threshold)

    def join(self, offset: int) -> None:
        number = next(n for n in range(SEQUENCES) if n not in self.live)
        self.live[number] = Expected(self.thresholds, offset)
        for engine in self.engines.values():
            engine.join(number)
        self.check()

    def leave(self, number: int) -> None:
        del self.live[number]
        for engine in self.engines.values():
            engine.leave(number)
        self.check()

    def rewind(self, number: int, length: int, offset: int) -> None:
        one = self.live[number]
        allowed = 0 <= length <= len(one.ids)
        for engine in self.engines.values():
            if allowed:
                engine.sequence(number).rewind(length)
            else:
                with pytest.raises(GenerationError, match="rewound"):
                    engine.sequence(number).rewind(length)
        if allowed:
            self.seen["rewound into pending tokens"] += one.lengths[-1] < length < len(one.ids)
            self.seen["rewound into the cache"] += 0 < length < one.lengths[-1]
            del one.ids[length:]
            one.offset = offset
            one.lengths = [min(held, length) for held in one.lengths]
        self.check()

    def set_thresholds(self, number: int, thresholds: Sequence[float]) -> None:
        self.live[number].thresholds = tuple(thresholds)
        for engine in self.engines.values():
            engine.sequence(number).set_thresholds(thresholds)
        self.check()

    def step(
        self, counts: Mapping[int, int], keep: Mapping[int, int], full: Collection[int], fail_at: int | None = None
    ) -> None:
        """Steps some sequences, unless the oracle is undecided about one of them.

        Args:
            counts: tokens of each.
            fail_at: the segment that fails, or the deepest that runs before it.
        """
        new, limits, texts, truths = dict[int, list[int]](), {}, {}, {}
        for n, count in counts.items():
            one, following = self.live[n], self.live[n].following()
            new[n] = list(islice(following, count))
            texts[n] = [*one.ids, *new[n]]
            limits[n] = (NEVER_EXIT,) * len(one.thresholds) if n in full else one.thresholds
            truths[n] = self.judge.truth(texts[n], limits[n], following)
        if any((np.abs(truths[n].scores - limits[n]) < UNDECIDED_GAP).any() for n in new):
            return
        exits = {n: self.judge.depths.index(truth.exit_layer) for n, truth in truths.items()}
        ran = self._segments_run(exits, {n: len(text) for n, text in texts.items()})
        if fail_at is not None:
            self._fail(new, keep, full, min(fail_at, max(ran.values()) - 1))
            return
        for name, engine in self.engines.items():
            for n, result in engine.step(new, keep, full):
                rows = min(keep.get(n, 1), len(texts[n]) - self.live[n].lengths[-1])
                self._compare(f"{name}, sequence {n}", result, truths[n], exits[n], ran[n], rows, n in keep, limits[n])
        for n, one in ((n, self.live[n]) for n in new):
            self._count(one, len(texts[n]), exits[n], ran[n])
            one.ids = texts[n]
            one.lengths = [len(one.ids) if k < ran[n] else held for k, held in enumerate(one.lengths)]
        self.check()

    def refuse(self, new: New, sentence: str) -> None:
        """A step that no engine takes."""
        for engine in self.engines.values():
            if engine.checks_ids or not any(OUTSIDE in ids for ids in new.values()):
                with pytest.raises(GenerationError, match=sentence):
                    dict(engine.step(new, {}, ()))
        self.seen["refused"] += 1
        self.check()

    def check(self) -> None:
        """Compares all counts."""
        for name, engine in self.engines.items():
            for n, one in self.live.items():
                state = engine.sequence(n)
                found = list(state.lengths), list(state.pending)
                pending = [before - after for before, after in zip(one.lengths, one.lengths[1:], strict=False)]
                assert found == (one.lengths, pending), f"{name}, sequence {n}"
                assert max(pending) <= self.max_pending

    def _segments_run(self, exits: Mapping[int, int], totals: Mapping[int, int]) -> dict[int, int]:
        """How many segments must run over each sequence, in one batch or one after the other."""
        if not self.batched and len(exits) > 1:
            return {n: self._segments_run({n: exits[n]}, totals)[n] for n in exits}
        ran, running = dict.fromkeys(exits, 1), list(exits)
        for k in range(1, len(self.judge.depths)):
            behind = {n: totals[n] - self.live[n].lengths[k] for n in exits}
            needing = [n for n in running if exits[n] >= k or behind[n] > self.max_pending]
            if not needing:
                break
            share = len(needing) / len(exits)
            everyone = len(running) == len(exits) and share >= self.compaction
            running = list(exits) if everyone else needing
            ran |= dict.fromkeys(running, k + 1)
        return ran

    def _compare(
        self,
        where: str,
        result: StepResult,
        truth: Truth,
        exit_segment: int,
        ran: int,
        rows: int,
        kept: bool,
        thresholds: Sequence[float],
    ) -> None:
        assert result.segments_run == ran, where
        logits, exit_layer = truth.logits[None], truth.exit_layer
        if ran == len(self.judge.depths) and (exit_segment + 1 == ran or (self.batched and kept)):
            logits, exit_layer = truth.full_logits[-rows:], self.judge.depths[-1]
        assert result.exit_layer == exit_layer, where
        assert result.position_logits.shape == logits.shape, where
        np.testing.assert_allclose(result.position_logits, logits, atol=TOLERANCE, err_msg=where)
        np.testing.assert_array_equal(result.logits, result.position_logits[-1], where)
        best, second = np.sort(logits[-1])[-1:-3:-1]
        assert result.logits.argmax() == logits[-1].argmax() or best - second < 2 * TOLERANCE, where
        if not self.batched:
            assert result.scores.dtype == np.float32, where
            asked = (np.arange(len(truth.scores)) <= exit_segment) & (np.array(thresholds) <= 1)
            scores = np.where(asked, truth.scores, np.nan)
            np.testing.assert_allclose(result.scores, scores, atol=1e-5, err_msg=where)
        self.seen[f"rows {'> 1' if len(logits) > 1 else '1'}"] += 1

    def _count(self, one: Expected, total: int, exit_segment: int, ran: int) -> None:
        self.seen[f"exit after segment {exit_segment}"] += 1
        self.seen["forced"] += ran > exit_segment + 1
        self.seen["caught up"] += any(total - held > 1 for held in one.lengths[1:ran] if one.ids)
        self.seen["a burst over the most that may be pending"] += (
            total - one.lengths[-1] == self.max_pending + 1 < total
        )
        self.seen["the whole context"] += total == self.context

    def _fail(self, new: New, keep: Mapping[int, int], full: Collection[int], k: int) -> None:
        number = next(iter(new))
        for engine in self.engines.values():
            context = engine.failing(number, k)
            if context is not None:
                with context, pytest.raises(GenerationError, match="injected"):
                    dict(engine.step(new, keep, full))
        self.seen["failed"] += 1
        self.check()


def play(player: Player, usual: int, exhaustive: int) -> None:
    """Plays so many random scripts in `make test` and `make test-all`; everything in `REQUIRED` must have happened."""
    drawn = cases(usual, exhaustive, stateful_step_count=30)
    run_state_machine_as_test(lambda: StepMachine(player), settings=drawn)
    missing = [what for what in REQUIRED if not player.seen[what]]
    assert not missing, player.seen


# --- what is drawn ---------------------------------------------------------------------------------------------------

PART = st.tuples(  # of one sequence in a step: tokens, logits to keep (0: not given), full
    st.sampled_from([1, 1, 2, 3, 6, 17, 30, 250]),
    st.sampled_from([0, 0, 1, 2, 20]),
    st.sampled_from([False, False, True]),
)
PARTS = st.lists(st.none() | PART, min_size=SEQUENCES, max_size=SEQUENCES)
NUMBER, OFFSET = st.integers(0, 5), st.integers(0, len(TEXT) - 1)  # the sequence with this number modulo their number
PICKS = st.lists(st.sampled_from([2, 2, 3, 4, 0, 1, 5, 6]), min_size=2, max_size=2)  # of a judge's thresholds


class StepMachine(RuleBasedStateMachine):
    """Draws actions for a player."""

    def __init__(self, player: Player) -> None:
        super().__init__()
        self.player = player

    @initialize(
        picks=PICKS,
        max_pending=st.sampled_from([4, 0, 1, 2, 20, NO_LIMIT, NO_LIMIT]),
        share=st.sampled_from([1.0, 0.5, 0.0]),
        offsets=st.lists(OFFSET, min_size=1, max_size=SEQUENCES),
    )
    def begin(self, picks: list[int], max_pending: int, share: float, offsets: list[int]) -> None:
        self.player.begin(self._thresholds(picks), max_pending, share)
        for offset in offsets:
            self.player.join(offset)

    @precondition(lambda self: len(self.player.live) < SEQUENCES)
    @rule(offset=OFFSET)
    def join(self, offset: int) -> None:
        self.player.join(offset)

    @rule(parts=PARTS)
    def step(self, parts: list) -> None:
        self._step(parts)

    @rule(times=st.integers(1, 8))
    def decode(self, times: int) -> None:
        """One token of each sequence, several times."""
        for _ in range(times):
            self._step([(1, 0, False)] * SEQUENCES)

    @rule(
        times=st.integers(1, 5),
        keep=st.integers(1, 6),
        verify=st.booleans(),
        number=NUMBER,
        rejected=st.integers(0, 5),
        offset=OFFSET,
    )
    def draft(self, times: int, keep: int, verify: bool, number: int, rejected: int, offset: int) -> None:
        """As in lossless mode: tokens that may exit, a run that verifies them, and some of them rejected."""
        for _ in range(times):
            self._step([(1, keep, False)] * SEQUENCES)
        self._step([(1, keep, verify)] * SEQUENCES)
        self.rewind(number, rejected, offset)

    @rule(parts=PARTS, k=st.integers(0, 2))
    def fail(self, parts: list, k: int) -> None:
        self._step(parts, fail_at=k)

    @rule(number=NUMBER, back=st.sampled_from([1, 2, 3, 5, 9, 20, 60]), offset=OFFSET)
    def rewind(self, number: int, back: int, offset: int) -> None:
        number = self._picked(number)
        self.player.rewind(number, max(0, len(self.player.live[number].ids) - back), offset)

    @rule(number=NUMBER, kind=st.sampled_from(["no tokens", "too many", "outside", "rewind", "rewind beyond"]))
    def refuse(self, number: int, kind: str) -> None:
        player, number = self.player, self._picked(number)
        length = len(player.live[number].ids)
        if kind.startswith("rewind"):
            player.rewind(number, -1 if kind == "rewind" else length + 1, 0)
        elif kind != "outside" or length < player.context:
            room = player.context - length
            bad, sentence = {
                "no tokens": ([], "a step needs at least one token"),
                "too many": ([5] * (room + 1), "but the model's context holds"),
                "outside": ([OUTSIDE], "."),  # each engine has its own
            }[kind]
            others = (n for n, one in player.live.items() if player.batched and n != number)
            beside = {n: [7] for n in others if len(player.live[n].ids) < player.context}
            player.refuse(beside | {number: bad}, sentence)

    @precondition(lambda self: len(self.player.live) > 1)
    @rule(number=NUMBER)
    def leave(self, number: int) -> None:
        self.player.leave(self._picked(number))

    @precondition(lambda self: not self.player.batched)
    @rule(number=NUMBER, picks=PICKS)
    def set_thresholds(self, number: int, picks: list[int]) -> None:
        self.player.set_thresholds(self._picked(number), self._thresholds(picks))

    def _picked(self, number: int) -> int:
        return sorted(self.player.live)[number % len(self.player.live)]

    def _thresholds(self, picks: list[int]) -> list[float]:
        return [values[pick] for values, pick in zip(self.player.judge.thresholds, picks, strict=True)]

    def _step(self, parts: list, fail_at: int | None = None) -> None:
        player, counts, keep, full = self.player, dict[int, int](), dict[int, int](), set[int]()
        for n, part in enumerate(parts):
            room = player.context - len(player.live[n].ids) if n in player.live else 0
            if part is None or room == 0:
                continue
            count, kept, all_segments = part
            counts[n] = min(count, room)
            if kept:
                keep[n] = kept
            if all_segments:
                full.add(n)
        if fail_at is not None and not player.batched:
            counts = dict(list(counts.items())[:1])
        if counts:
            player.step(counts, keep, full & counts.keys(), fail_at)
