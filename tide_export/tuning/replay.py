"""Estimates how fast lossless mode would be under any setting, from one recording and a few step times.

Used by `tuning.lossless`. The recording is a `Measurement` of the model's own greedy continuations: every router's
score at every position, and whether the early token is the full model's. With the cost of a draft and of a verifying
run on this machine, the loop of drafting and verifying is replayed for any setting without running the model. What
follows a wrong draft is not recorded; the replay takes the scores and the prompt lookups of the right text there, which
only affects how much is drafted in vain.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from statistics import median

import numpy as np

from tide_export.runtime.decoding.prompt_lookup import PromptLookup, next_length
from tide_export.runtime.engine import Engine
from tide_export.runtime.sequence import NO_LIMIT, SingleSequence
from tide_export.thresholds.pareto import exits
from tide_export.thresholds.resolve import ALWAYS_EXIT, MAX_THRESHOLD, NEVER_EXIT
from tide_export.tuning.measure import Measurement

GRID = 12  # thresholds tried per checkpoint
DRAFTS = (1, 2, 3, 4, 6, 8, 12)
SWEEPS = 3
LOOKUPS = (4, 8, 15)
MIN_MATCHES = (1, 2, 3)
WARMUP = 2  # rounds of timing that pay for memory and caches
NO_MATCH = -1

Matches = list[list[int]]  # per text and position: tokens of the prompt-lookup draft that are right, or NO_MATCH


@dataclass(frozen=True)
class StepCosts:
    """Median seconds of single steps on this machine.

    Attributes:
        draft: per checkpoint, a step that exits there with nothing pending after it.
        verify: by n, a step of one token that runs every segment, the deep ones over n tokens.
        block: by n, a step of n tokens that runs every segment over all of them.
        plain: a step at full depth with nothing pending, as in mode full.
    """

    draft: tuple[float, ...]
    verify: dict[int, float]
    block: dict[int, float]
    plain: float

    def verifying(self, pending: int, tokens: int = 1) -> float:
        """Seconds of a step of `tokens` that runs every segment, with `pending` more tokens before the deep ones."""
        new = np.interp(tokens, list(self.block), list(self.block.values()))
        lengths, seconds = list(self.verify), list(self.verify.values())
        return float(new + np.interp(pending + tokens, lengths, seconds) - np.interp(tokens, lengths, seconds))


@dataclass(frozen=True)
class Setting:
    """How to draft (see `manifest.Drafting`), and the expected speed-up: full depth's time over this setting's."""

    thresholds: tuple[float, ...]
    max_drafts: int
    prompt_lookup: int
    min_match: int
    speedup: float


def step_costs(
    engine: Engine, ids: Sequence[int], max_draft: int = max(DRAFTS) + max(LOOKUPS), rounds: int = 15
) -> StepCosts:
    """Times single steps after `ids`, interleaved so that a busy moment affects all alike.

    Args:
        ids: at least one token id and the last is stepped again and again; K/V of this length is what steps read.
        max_draft: tokens of the longest draft.
        rounds: of all kinds of steps.
    """
    count = len(engine.manifest.checkpoints)
    exits = [[ALWAYS_EXIT if k == c else NEVER_EXIT for k in range(count)] for c in range(count)]
    *drafts, state = [engine.start(t, NO_LIMIT, max_draft + 2) for t in (*exits, [ALWAYS_EXIT] * count)]
    for sequence in (*drafts, state):
        sequence.step(ids, full=True)
    last = [ids[-1]]
    lengths = sorted({1, 2, 4, max_draft + 1} | {n + 1 for n in (*DRAFTS, *LOOKUPS) if n < max_draft})

    def timed(sequence: SingleSequence, before: int, tokens: int, logits_to_keep: int, full: bool) -> float:
        for _ in range(before):
            sequence.step(last)
        started = time.perf_counter()
        sequence.step(last * tokens, logits_to_keep, full)
        seconds = time.perf_counter() - started
        sequence.rewind(len(ids))
        return seconds

    cases: dict[tuple[str, int], Callable[[], float]] = {("plain", 0): partial(timed, state, 0, 1, 1, True)}
    cases |= {("draft", c): partial(timed, draft, 0, 1, 2, False) for c, draft in enumerate(drafts)}
    cases |= {("block", n): partial(timed, state, 0, n, n, True) for n in lengths}
    if drafts:
        cases |= {("verify", n): partial(timed, state, n - 1, 1, n, True) for n in lengths}
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in cases}
    order = random.Random(0)
    for _ in range(WARMUP + rounds):
        for name in order.sample(list(cases), len(cases)):
            seconds[name].append(cases[name]())
    medians = {name: median(values[WARMUP:]) for name, values in seconds.items()}
    return StepCosts(
        tuple(medians["draft", c] for c in range(count)),
        {n: medians["verify" if drafts else "block", n] for n in lengths},
        {n: medians["block", n] for n in lengths},
        medians["plain", 0],
    )


def lookup_matches(prompts: Sequence[Sequence[int]], full: np.ndarray, min_match: int) -> Matches:
    """How many tokens of each prompt-lookup draft are right along recorded continuations.

    Args:
        prompts: n lists of token ids.
        full: int64 [n, P], the full model's tokens after each.
    """
    matches = []
    for prompt, continuation in zip(prompts, full.tolist(), strict=True):
        lookup = PromptLookup(max(LOOKUPS), min_match)
        lookup.extend(prompt)
        counts = []
        for position, token in enumerate(continuation):
            draft = lookup.draft((), max(LOOKUPS))
            truth = continuation[position : position + len(draft)]
            wrong = [i for i, pair in enumerate(zip(draft, truth, strict=False)) if pair[0] != pair[1]]
            counts.append((wrong[0] if wrong else len(truth)) if draft else NO_MATCH)
            lookup.extend([token])
        matches.append(counts)
    return matches


@dataclass(frozen=True)
class Replayed:
    """What lossless mode would have done to the recorded texts."""

    seconds: float  # per token
    drafted: int  # by early exits
    accepted: int
    lookup_drafted: int
    lookup_accepted: int


def replay(
    recorded: Measurement,
    costs: StepCosts,
    thresholds: Sequence[float],
    max_drafts: int,
    matches: Matches | None = None,
    prompt_lookup: int = 0,
) -> Replayed:
    """Replays lossless mode on the recorded texts.

    Args:
        matches: of `lookup_matches`; None drafts by early exits alone.
        prompt_lookup: tokens of one prompt-lookup draft, at most.
    """
    n, positions, columns = recorded.scores.shape
    left = exits(recorded.scores.reshape(n * positions, columns), thresholds).reshape(n, positions)
    right = np.concatenate([recorded.agrees, np.ones((n, positions, 1), bool)], axis=2)
    right = np.take_along_axis(right, left[..., None], axis=2)[..., 0]
    no_matches = [[NO_MATCH] * positions] * n
    verifying = cache(costs.verifying)
    seconds, tokens, drafted, accepted, lookup_drafted, lookup_accepted = 0.0, 0, 0, 0, 0, 0
    for leaves, agrees, known in zip(left.tolist(), right.tolist(), matches or no_matches, strict=True):
        start, length = 0, prompt_lookup
        while start < positions:
            drafts, right_drafts, lookup_length, position = 0, 0, 0, start
            while position < positions:
                if known[position] != NO_MATCH:
                    lookup_length = min(length, positions - position)
                    break
                if drafts == max_drafts or leaves[position] == columns:
                    break
                seconds += costs.draft[leaves[position]]
                right_drafts += right_drafts == drafts and agrees[position]
                drafts += 1
                position += 1
            seconds += verifying(drafts, lookup_length + 1)
            right_lookups = 0
            if lookup_length and right_drafts == drafts:
                right_lookups = min(lookup_length, known[position])
                length = next_length(length, prompt_lookup, lookup_length, right_lookups)
            verified = right_drafts + right_lookups + 1
            tokens, start = tokens + verified, start + verified
            drafted, accepted = drafted + drafts, accepted + right_drafts
            lookup_drafted, lookup_accepted = lookup_drafted + lookup_length, lookup_accepted + right_lookups
    return Replayed(seconds / tokens, drafted, accepted, lookup_drafted, lookup_accepted)


def best_setting(recorded: Measurement, costs: StepCosts, prompts: Sequence[Sequence[int]]) -> Setting:
    """The setting with the highest expected speed-up; everything off, with speed-up 1, where none is faster.

    The best prompt lookup is found without early exits. With it, and without any, follows a coordinate ascent over the
    checkpoints' thresholds, for each number of drafts.

    Args:
        prompts: token ids, of which continuations were recorded.
    """
    columns = recorded.scores.shape[-1]
    off = Setting((MAX_THRESHOLD,) * columns, 0, 0, max(MIN_MATCHES), 1.0)
    best = best_lookup = off
    matches = {min_match: lookup_matches(prompts, recorded.full, min_match) for min_match in MIN_MATCHES}
    for min_match, length in product(MIN_MATCHES, LOOKUPS):
        speedup = costs.plain / replay(recorded, costs, off.thresholds, 0, matches[min_match], length).seconds
        if speedup > best.speedup:
            best = best_lookup = Setting(off.thresholds, 0, length, min_match, speedup)
    for base in dict.fromkeys((off, best_lookup)):
        known = matches[base.min_match] if base.prompt_lookup else None
        for max_drafts in DRAFTS if columns else ():
            best = max(
                best, _ascend(recorded, costs, replace(base, max_drafts=max_drafts), known), key=lambda s: s.speedup
            )
    return best


def _ascend(recorded: Measurement, costs: StepCosts, start: Setting, matches: Matches | None) -> Setting:
    """The best thresholds found by changing one at a time."""
    quantiles = np.linspace(0.02, 0.98, GRID)
    current = start
    for _ in range(SWEEPS):
        before = current
        for c in range(recorded.scores.shape[-1]):
            grid = {0.0, *np.quantile(recorded.scores[..., c], quantiles).astype(np.float32).tolist(), MAX_THRESHOLD}
            for value in sorted(min(max(value, 0.0), MAX_THRESHOLD) for value in grid):
                tried = (*current.thresholds[:c], value, *current.thresholds[c + 1 :])
                replayed = replay(recorded, costs, tried, start.max_drafts, matches, start.prompt_lookup)
                if costs.plain / replayed.seconds > current.speedup:
                    current = replace(current, thresholds=tried, speedup=costs.plain / replayed.seconds)
        if current == before:
            break
    return current
