"""Estimates the speed of lossless mode by source of drafts, from one recording and a few step times.

The recording is a `Measurement` of the model's continuations: every router's score at every position, and the token of
an exit there, drawn with the noise of the token that was chosen. Given the cost of a draft and of a verification on
this machine, the runtime's decoder replays the recording without the model. It knows nothing of exits at the beginning
of each text, which an engine remembers. After a wrong draft nothing was recorded; the replay uses the scores of the
right text there, which only affects how much is drafted in vain.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tide_export.bundle.manifest import Drafting
from tide_export.runtime.engine import Engine
from tide_export.runtime.native import call, int64s
from tide_export.runtime.stepping import NO_LIMIT, SingleSequence
from tide_export.thresholds.resolve import ALWAYS_EXIT, MAX_THRESHOLD, NEVER_EXIT
from tide_export.tuning.measure import Measurement

DRAFTS = 8  # maximum drafts by exits, or of a drafter, before one verification
LOOKUP = 15  # maximum tokens of a prompt-lookup draft
WARMUP = 2  # rounds of timing that are discarded: they allocate memory and fill caches
QUICKEST = 4  # the quickest 1 / QUICKEST of the steps counts, because other programs delay some steps


@dataclass(frozen=True)
class StepCosts:
    """Seconds of single steps on this machine, each the lower quartile of several.

    Attributes:
        draft: per checkpoint, a step that exits there with no token pending after it.
        verify: by n, a step of one token that runs every segment, the deep ones over n tokens.
        block: by n, a step of n tokens that runs every segment over all of them.
        plain: a step at full depth with no token pending, as in mode full.
    """

    draft: tuple[float, ...]
    verify: dict[int, float]
    block: dict[int, float]
    plain: float

    @property
    def draft_costs(self) -> tuple[float, ...]:
        """Costs of drafts by early exits relative to `plain`, for `manifest.Drafting`."""
        return tuple(round(seconds / self.plain, 4) for seconds in self.draft)

    @property
    def verify_costs(self) -> tuple[float, ...]:
        """Costs of verifying 1, 2, 4, 8 and 16 drafts relative to `plain`; never decreasing."""
        seconds = np.interp([1, 2, 3, 5, 9, 17], list(self.block), list(self.block.values()))
        costs = np.maximum.accumulate(seconds[1:] - seconds[0]) / self.plain
        return tuple(np.maximum(costs, 0.0).round(4).tolist())

    def verifying(self, pending: int, tokens: int = 1) -> float:
        """Returns the seconds of a step of `tokens` over all segments, the deep ones with `pending` more."""
        new = np.interp(tokens, list(self.block), list(self.block.values()))
        lengths, seconds = list(self.verify), list(self.verify.values())
        return float(new + np.interp(pending + tokens, lengths, seconds) - np.interp(tokens, lengths, seconds))


@dataclass(frozen=True)
class Setting:
    """Options of drafting (those of `manifest.Drafting`) and the speed-up expected over full depth.

    The speed-up is None if only a measurement can tell it.
    """

    thresholds: tuple[float, ...]
    max_drafts: int
    prompt_lookup: int
    speedup: float | None
    max_learned: int | None = None

    def drafting(self, tuning: dict[str, Any] | None = None) -> Drafting:
        """Returns the manifest's field for this setting, without costs: the runtime measures them."""
        return Drafting(
            self.thresholds, self.max_drafts, self.prompt_lookup, tuning=tuning or {}, max_learned=self.max_learned
        )


def step_costs(
    engine: Engine, ids: Sequence[int], max_draft: int = DRAFTS + LOOKUP, rounds: int = 15, pending: bool = True
) -> StepCosts:
    """Times single steps after `ids`, interleaved so that a busy moment affects all alike.

    Args:
        ids: one or more token ids, of which the last is stepped repeatedly; the K/V that steps read have this length.
        max_draft: tokens of the longest draft.
        rounds: number of times that each kind of step is timed.
        pending: time steps over pending tokens too; else `verify` is `block`.
    """
    count = len(engine.manifest.checkpoints)
    exits = [[ALWAYS_EXIT if k == c else NEVER_EXIT for k in range(count)] for c in range(count)]
    *drafts, state = [engine.start(t, NO_LIMIT) for t in (*exits, [ALWAYS_EXIT] * count)]
    for sequence in (*drafts, state):
        sequence.step(ids, full=True)
    last = [ids[-1]]
    lengths = sorted({1, 2, 4, max_draft + 1} | {n + 1 for n in (1, 2, 4, 8, LOOKUP) if n < max_draft})

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
    if drafts and pending:
        cases |= {("verify", n): partial(timed, state, n - 1, 1, n, True) for n in lengths}
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in cases}
    order = random.Random(0)
    for _ in range(WARMUP + rounds):
        for name in order.sample(list(cases), len(cases)):
            seconds[name].append(cases[name]())
    costs = {name: sorted(values[WARMUP:])[rounds // QUICKEST] for name, values in seconds.items()}
    return StepCosts(
        tuple(costs["draft", c] for c in range(count)),
        {n: costs["verify" if drafts and pending else "block", n] for n in lengths},
        {n: costs["block", n] for n in lengths},
        costs["plain", 0],
    )


@dataclass(frozen=True)
class Replayed:
    """Result of a replay of lossless mode on the recorded texts."""

    seconds: float  # per token
    drafted: int  # by early exits
    accepted: int
    lookup_drafted: int
    lookup_accepted: int


def replay(recorded: Measurement, costs: StepCosts, prompts: Sequence[Sequence[int]], setting: Setting) -> Replayed:
    """Replays lossless mode on the recorded texts, from the second token on.

    Args:
        prompts: token ids of the prompts whose continuations were recorded.
    """
    n, positions, columns = recorded.scores.shape
    drafting = json.dumps(
        {
            "thresholds": setting.thresholds,
            "max_drafts": setting.max_drafts,
            "prompt_lookup": setting.prompt_lookup,
            "draft_costs": costs.draft_costs,
            "verify_costs": costs.verify_costs,
        }
    ).encode()
    verifying, seconds, counts = cache(costs.verifying), 0.0, np.zeros(4, np.int64)
    for number, prompt in enumerate(prompts):
        ids, early, full = (int64s(values) for values in (prompt, recorded.early[number], recorded.full[number]))
        scores: npt.NDArray[np.float32] = np.ascontiguousarray(recorded.scores[number], np.float32)
        totals, drafts, runs = (np.zeros(size, np.int64) for size in (4, columns, (positions, 2)))
        arrays = (values.ctypes.data for values in (scores, early, full))
        results = (values.ctypes.data for values in (totals, drafts, runs))
        call("replay", drafting, ids.ctypes.data, len(ids), *arrays, positions, columns, *results)
        seconds += float(drafts @ np.array(costs.draft)) if columns else 0.0
        seconds += sum(verifying(pending, tokens) for pending, tokens in runs.tolist() if tokens)
        counts += totals
    drafted, accepted, lookup_drafted, lookup_accepted = counts.tolist()
    return Replayed(
        seconds / (n * (positions - 1)),
        drafted - lookup_drafted,
        accepted - lookup_accepted,
        lookup_drafted,
        lookup_accepted,
    )


def learned(checkpoints: int) -> Setting:
    """Returns the setting of the bundle's drafter and prompt lookup, whose gain no recording tells."""
    return replace(off(checkpoints), prompt_lookup=LOOKUP, max_learned=DRAFTS, speedup=None)


def off(checkpoints: int) -> Setting:
    """Returns the setting without drafts."""
    return Setting((MAX_THRESHOLD,) * checkpoints, 0, 0, 1.0, 0)


def best_setting(recorded: Measurement, costs: StepCosts, prompts: Sequence[Sequence[int]]) -> Setting:
    """Returns the setting with the highest expected speed-up; all off, with speed-up 1, if none is faster.

    Early exits draft or do not, with and without prompt lookup.

    Args:
        prompts: token ids of the prompts whose continuations were recorded.
    """
    columns = recorded.scores.shape[-1]
    nothing = off(columns)
    exits = replace(nothing, thresholds=(0.0,) * columns, max_drafts=DRAFTS)
    sources = [nothing, exits] if columns else [nothing]
    settings = [*sources[1:], *(replace(one, prompt_lookup=LOOKUP) for one in sources)]
    return max(nothing, *(_tried(recorded, costs, prompts, one) for one in settings), key=_speedup)


def _speedup(setting: Setting) -> float:
    assert setting.speedup is not None
    return setting.speedup


def _tried(recorded: Measurement, costs: StepCosts, prompts: Sequence[Sequence[int]], setting: Setting) -> Setting:
    """Returns the setting with its expected speed-up."""
    return replace(setting, speedup=costs.plain / replay(recorded, costs, prompts, setting).seconds)
