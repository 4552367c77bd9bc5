"""How fast lossless mode would be under any thresholds, from one recording and a few step times.

Used by `tune.lossless`. A recording is a `Measurement` of the model's own greedy continuations: what every router says
at every position and whether the early token is the full model's. Together with what a draft and a verifying run cost
on this machine, the whole loop of drafting and verifying can be replayed for any setting without running the model.
What is drafted behind a wrong draft is not on record; the replay lets the routers say there what they say about the
right text, which only decides how much is drafted in vain.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from tide_export.frontier import exits
from tide_export.runtime.engine import Engine
from tide_export.runtime.state import NO_LIMIT, State
from tide_export.tune.measure import ALWAYS, Measurement

OFF = 1.0  # no score is above 1, and a manifest may hold it
GRID = 12  # thresholds tried per checkpoint
DRAFTS = (1, 2, 3, 4, 6, 8, 12)
SWEEPS = 3


@dataclass(frozen=True)
class StepCosts:
    """Median seconds of single steps on this machine.

    Attributes:
        draft: per checkpoint, a step that leaves there with nothing waiting behind it.
        verify: by n, a step that runs every segment, the deep ones over n tokens.
        plain: a step at full depth with nothing waiting, as in mode full.
    """

    draft: tuple[float, ...]
    verify: dict[int, float]
    plain: float

    def verifying(self, tokens: int) -> float:
        """Seconds of a run over `tokens` waiting tokens, interpolated."""
        return float(np.interp(tokens, list(self.verify), list(self.verify.values())))


@dataclass(frozen=True)
class Setting:
    """Thresholds and a draft limit, and what the replay expects of them: full depth's time over theirs."""

    thresholds: tuple[float, ...]
    max_drafts: int
    speedup: float


def step_costs(engine: Engine, ids: Sequence[int], most: int = max(DRAFTS), rounds: int = 15) -> StepCosts:
    """Times single steps behind `ids`, in turns so that a busy moment hits all alike.

    Args:
        ids: at least one token id and the last is stepped again and again; K/V of this length is what steps read.
        most: longest draft of interest.
    """
    count = len(engine.manifest.checkpoints)
    drafts = [engine.start([ALWAYS if k == c else 2.0 for k in range(count)], NO_LIMIT, most + 2) for c in range(count)]
    state, last = engine.start([ALWAYS] * count, NO_LIMIT, most + 2), [ids[-1]]
    for one in (*drafts, state):
        one.step(ids, full=True)
    lengths = sorted({1, 2, 4, most + 1} | {n + 1 for n in DRAFTS if n < most})

    def timed(one: State, before: int, logits_to_keep: int, full: bool) -> float:
        for _ in range(before):
            one.step(last)
        started = time.perf_counter()
        one.step(last, logits_to_keep, full)
        seconds = time.perf_counter() - started
        one.rewind(len(ids))
        return seconds

    cases: dict[tuple[str, int], Callable[[], float]] = {("plain", 0): partial(timed, state, 0, 1, True)}
    cases |= {("draft", c): partial(timed, one, 0, 2, False) for c, one in enumerate(drafts)}
    cases |= {("verify", n): partial(timed, state, n - 1, n, True) for n in lengths}
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
        {n: medians["verify", n] for n in lengths},
        medians["plain", 0],
    )


def replay(
    recorded: Measurement, costs: StepCosts, thresholds: Sequence[float], max_drafts: int
) -> tuple[float, int, int]:
    """Seconds per token, drafts and accepted drafts of lossless mode on the recorded texts."""
    n, positions, columns = recorded.scores.shape
    left = exits(recorded.scores.reshape(-1, columns), thresholds).reshape(n, positions)
    right = np.concatenate([recorded.agrees, np.ones((n, positions, 1), bool)], axis=2)
    right = np.take_along_axis(right, left[..., None], axis=2)[..., 0]
    seconds, tokens, drafted, accepted = 0.0, 0, 0, 0
    for leaves, agrees in zip(left.tolist(), right.tolist(), strict=True):
        start = 0
        while start < positions:
            drafts, stood, holds = 0, 0, True
            while drafts < max_drafts and start + drafts < positions and leaves[start + drafts] < columns:
                seconds += costs.draft[leaves[start + drafts]]
                holds = holds and agrees[start + drafts]
                stood += holds
                drafts += 1
            seconds += costs.verifying(drafts + 1)
            tokens += stood + 1
            drafted += drafts
            accepted += stood
            start += stood + 1
    return seconds / tokens, drafted, accepted


def best_setting(recorded: Measurement, costs: StepCosts) -> Setting:
    """The setting with the highest expected speed-up: coordinate ascent over checkpoints, from one alone to all.

    With nothing that pays, all thresholds are off and the speed-up is 1.
    """
    columns = recorded.scores.shape[-1]
    quantiles = np.linspace(0.02, 0.98, GRID)
    grids = [
        sorted({0.0, *np.quantile(recorded.scores[..., c], quantiles).astype(np.float32).tolist(), OFF})
        for c in range(columns)
    ]
    grids = [[min(max(value, 0.0), OFF) for value in grid] for grid in grids]
    best = Setting((OFF,) * columns, 0, 1.0)
    for max_drafts in DRAFTS:
        current = Setting((OFF,) * columns, max_drafts, 1.0)
        for _ in range(SWEEPS):
            before = current
            for c in range(columns):
                for value in grids[c]:
                    tried = (*current.thresholds[:c], value, *current.thresholds[c + 1 :])
                    speedup = costs.plain / replay(recorded, costs, tried, max_drafts)[0]
                    if speedup > current.speedup:
                        current = Setting(tried, max_drafts, speedup)
            if current == before:
                break
        if current.speedup > best.speedup:
            best = current
    return best
