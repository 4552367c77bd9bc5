"""How fast lossless mode would be under any thresholds, from one recording and a few step times.

Used by `tuning.lossless`. A recording is a `Measurement` of the model's own greedy continuations: what every router
says at every position and whether the early token is the full model's. Together with what a draft and a verifying run
cost on this machine, the whole loop of drafting and verifying can be replayed for any setting without running the
model. What is drafted behind a wrong draft is not on record; the replay lets routers and lookups say there what they
say about the right text, which only decides how much is drafted in vain.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from statistics import median

import numpy as np

from tide_export.runtime.branched.sequence import NO_LIMIT, State
from tide_export.runtime.decoding.prompt_lookup import PromptLookup, next_length
from tide_export.runtime.engine import Engine
from tide_export.thresholds.pareto import exits
from tide_export.thresholds.resolve import ALWAYS_EXIT, MAX_THRESHOLD, NEVER_EXIT
from tide_export.tuning.measure import Measurement

GRID = 12  # thresholds tried per checkpoint
DRAFTS = (1, 2, 3, 4, 6, 8, 12)
SWEEPS = 3
LOOKUPS = (4, 8, 15)
LEAST_MATCHES = (1, 2, 3)
NONE_FOUND = -1

Lookups = list[list[int]]  # per text and position: tokens a guess gets right there, or NONE_FOUND


@dataclass(frozen=True)
class StepCosts:
    """Median seconds of single steps on this machine.

    Attributes:
        draft: per checkpoint, a step that leaves there with nothing waiting behind it.
        verify: by n, a step of one token that runs every segment, the deep ones over n tokens.
        block: by n, a step of n tokens that runs every segment over all of them.
        plain: a step at full depth with nothing waiting, as in mode full.
    """

    draft: tuple[float, ...]
    verify: dict[int, float]
    block: dict[int, float]
    plain: float

    def verifying(self, waited: int, tokens: int = 1) -> float:
        """Seconds of a step of `tokens` that runs every segment, with `waited` more tokens before the deep ones."""
        new = np.interp(tokens, list(self.block), list(self.block.values()))
        lengths, seconds = list(self.verify), list(self.verify.values())
        return float(new + np.interp(waited + tokens, lengths, seconds) - np.interp(tokens, lengths, seconds))


@dataclass(frozen=True)
class Setting:
    """How to draft (see `manifest.Drafting`), and what the replay expects of it: full depth's time over this one's."""

    thresholds: tuple[float, ...]
    max_drafts: int
    prompt_lookup: int
    min_match: int
    speedup: float


def step_costs(
    engine: Engine, ids: Sequence[int], most: int = max(DRAFTS) + max(LOOKUPS), rounds: int = 15
) -> StepCosts:
    """Times single steps behind `ids`, in turns so that a busy moment hits all alike.

    Args:
        ids: at least one token id and the last is stepped again and again; K/V of this length is what steps read.
        most: longest draft of interest.
        rounds: of all kinds of steps.
    """
    count = len(engine.manifest.checkpoints)
    drafts = [
        engine.start([ALWAYS_EXIT if k == c else NEVER_EXIT for k in range(count)], NO_LIMIT, most + 2)
        for c in range(count)
    ]
    state, last = engine.start([ALWAYS_EXIT] * count, NO_LIMIT, most + 2), [ids[-1]]
    for one in (*drafts, state):
        one.step(ids, full=True)
    lengths = sorted({1, 2, 4, most + 1} | {n + 1 for n in (*DRAFTS, *LOOKUPS) if n < most})

    def timed(one: State, before: int, tokens: int, logits_to_keep: int, full: bool) -> float:
        for _ in range(before):
            one.step(last)
        started = time.perf_counter()
        one.step(last * tokens, logits_to_keep, full)
        seconds = time.perf_counter() - started
        one.rewind(len(ids))
        return seconds

    cases: dict[tuple[str, int], Callable[[], float]] = {("plain", 0): partial(timed, state, 0, 1, 1, True)}
    cases |= {("draft", c): partial(timed, one, 0, 1, 2, False) for c, one in enumerate(drafts)}
    cases |= {("block", n): partial(timed, state, 0, n, n, True) for n in lengths}
    if drafts:
        cases |= {("verify", n): partial(timed, state, n - 1, 1, n, True) for n in lengths}
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in cases}
    order = random.Random(0)
    for number in range(rounds + 2):
        for name in order.sample(list(cases), len(cases)):
            elapsed = cases[name]()
            if number >= 2:  # the first pay for memory and caches
                seconds[name].append(elapsed)
    medians = {name: median(values) for name, values in seconds.items()}
    return StepCosts(
        tuple(medians["draft", c] for c in range(count)),
        {n: medians["verify" if drafts else "block", n] for n in lengths},
        {n: medians["block", n] for n in lengths},
        medians["plain", 0],
    )


def look_up(texts: Sequence[Sequence[int]], full: np.ndarray, min_match: int) -> Lookups:
    """What guesses from earlier text are worth along recorded continuations.

    Args:
        texts: the prompts, token ids.
        full: int64 [n, P], what the model said behind each.
    """
    found = []
    for prompt, said in zip(texts, full.tolist(), strict=True):
        lookup = PromptLookup(max(LOOKUPS), min_match)
        lookup.extend(prompt)
        rights = []
        for place, token in enumerate(said):
            guess = lookup.guess((), max(LOOKUPS))
            truth = said[place : place + len(guess)]
            wrong = [i for i, pair in enumerate(zip(guess, truth, strict=False)) if pair[0] != pair[1]]
            rights.append((wrong[0] if wrong else len(truth)) if guess else NONE_FOUND)
            lookup.extend([token])
        found.append(rights)
    return found


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
    lookups: Lookups | None = None,
    most: int = 0,
) -> Replayed:
    """Lossless mode on the recorded texts.

    Args:
        lookups: of `look_up`; None drafts by early exits alone.
        most: tokens of one guess.
    """
    n, positions, columns = recorded.scores.shape
    left = exits(recorded.scores.reshape(n * positions, columns), thresholds).reshape(n, positions)
    right = np.concatenate([recorded.agrees, np.ones((n, positions, 1), bool)], axis=2)
    right = np.take_along_axis(right, left[..., None], axis=2)[..., 0]
    nowhere = [[NONE_FOUND] * positions] * n
    verifying = cache(costs.verifying)
    seconds, tokens, drafted, accepted, lookup_drafted, lookup_accepted = 0.0, 0, 0, 0, 0, 0
    for leaves, agrees, known in zip(left.tolist(), right.tolist(), lookups or nowhere, strict=True):
        start, length = 0, most
        while start < positions:
            drafts, stood, guessed, holds, place = 0, 0, 0, True, start
            while place < positions:
                if known[place] != NONE_FOUND:
                    guessed = min(length, positions - place)
                    break
                if drafts == max_drafts or leaves[place] == columns:
                    break
                seconds += costs.draft[leaves[place]]
                holds = holds and agrees[place]
                stood += holds
                drafts += 1
                place += 1
            seconds += verifying(drafts, guessed + 1)
            sure = 0
            if guessed and holds:
                sure = min(guessed, known[place])
                length = next_length(length, most, guessed, sure)
            tokens += stood + sure + 1
            drafted, accepted = drafted + drafts, accepted + stood
            lookup_drafted, lookup_accepted = lookup_drafted + guessed, lookup_accepted + sure
            start += stood + sure + 1
    return Replayed(seconds / tokens, drafted, accepted, lookup_drafted, lookup_accepted)


def best_setting(recorded: Measurement, costs: StepCosts, texts: Sequence[Sequence[int]]) -> Setting:
    """The setting with the highest expected speed-up.

    The best way to look up is found with no early exits; with it, and without lookups, follows a coordinate ascent over
    the checkpoints' thresholds, from one alone to all. With nothing that pays, everything is off and the speed-up is 1.

    Args:
        texts: the prompts behind which was recorded.
    """
    columns = recorded.scores.shape[-1]
    off = Setting((MAX_THRESHOLD,) * columns, 0, 0, max(LEAST_MATCHES), 1.0)
    best = looked = off
    found = {least: look_up(texts, recorded.full, least) for least in LEAST_MATCHES}
    for least, most in product(LEAST_MATCHES, LOOKUPS):
        speedup = costs.plain / replay(recorded, costs, off.thresholds, 0, found[least], most).seconds
        if speedup > looked.speedup:
            best = looked = Setting(off.thresholds, 0, most, least, speedup)
    for base in dict.fromkeys((off, looked)):
        lookups = found[base.min_match] if base.prompt_lookup else None
        for max_drafts in DRAFTS if columns else ():
            current = _ascend(recorded, costs, replace(base, max_drafts=max_drafts), lookups)
            if current.speedup > best.speedup:
                best = current
    return best


def _ascend(recorded: Measurement, costs: StepCosts, start: Setting, lookups: Lookups | None) -> Setting:
    """The best thresholds found by changing one at a time."""
    quantiles = np.linspace(0.02, 0.98, GRID)
    current = start
    for _ in range(SWEEPS):
        before = current
        for c in range(recorded.scores.shape[-1]):
            grid = {0.0, *np.quantile(recorded.scores[..., c], quantiles).astype(np.float32).tolist(), MAX_THRESHOLD}
            for value in sorted(min(max(value, 0.0), MAX_THRESHOLD) for value in grid):
                tried = (*current.thresholds[:c], value, *current.thresholds[c + 1 :])
                replayed = replay(recorded, costs, tried, start.max_drafts, lookups, start.prompt_lookup)
                if costs.plain / replayed.seconds > current.speedup:
                    current = replace(current, thresholds=tried, speedup=costs.plain / replayed.seconds)
        if current == before:
            break
    return current
