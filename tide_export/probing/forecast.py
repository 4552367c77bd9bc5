"""Predicts the speed of each mode from step times and measured exits.

Mode `exit` is the runtime's rule over the recorded positions: a token that exits waits before the next segment, which
runs over all that wait. Lossless mode with exits and n-grams is `tuning.replay`. Thresholds are chosen on some of the
answers and their speed is taken on the others, in turn; the range is over these parts. No drafter exists yet, so the
share of drafts that is accepted is a prior: what trained drafters of two models reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import mean

import numpy as np

from tide_export.drafting.schedule import expected_speed
from tide_export.probing.early import Early
from tide_export.probing.steps import Steps
from tide_export.thresholds.pareto import exits, frontier
from tide_export.tuning.measure import Measurement
from tide_export.tuning.replay import best_setting, replay

FOLDS = 4
ACCEPTED = (0.40, 0.50, 0.60)  # of first drafts after 25 to 90 minutes: docs/measurements/modes-and-drafts.md
MAX_PENDING = 16  # a bundle's
KV_TOKENS = 1024
PROCESS_BYTES = 60_000_000  # of Python and the runtime: docs/measurements/serving.md
MACHINE = 0.05  # of a full-depth speed: what other runs on a quiet machine differ by, and a line over layers misses


@dataclass(frozen=True)
class Prediction:
    """An expected value and its range."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Exits:
    """Predicts for mode `exit` its speed over full depth's, the changed tokens and layers per token."""

    speed: Prediction
    changed: float
    layers: float


@dataclass(frozen=True)
class Forecast:
    """The predicted speeds of a bundle with one type of weights, those of modes over full depth's.

    Attributes:
        weights: fp32, bf16 or int4.
        tokens_per_second: full depth.
        exit: mode exit; None: a model of one layer.
        lossless: lossless mode with drafts of exits and n-grams; None: as before, or every answer is a token.
        drafter: lossless mode with a trained drafter.
        verify_costs: what verifying 1, 2, 4, 8 and 16 drafts costs more, in steps.
        memory: bytes of a process that runs it, with 1,024 tokens in its K/V.
        disk: bytes of the bundle, without its tokenizer.
    """

    weights: str
    tokens_per_second: Prediction
    exit: Exits | None
    lossless: Prediction | None
    drafter: Prediction
    verify_costs: tuple[float, ...]
    memory: int
    disk: int


def forecast(steps: Steps, early: Early, prompts: Sequence[Sequence[int]], epsilon: float) -> Forecast:
    """Predicts the modes of one type of weights.

    Args:
        epsilon: share of tokens that mode exit may change.
    """
    speed, margin = 1 / steps.plain, max(MACHINE, steps.spread)
    costs = steps.costs(early.checkpoints)
    low, expected, high = (max(1.0, expected_speed((share,), costs.verify_costs)) for share in ACCEPTED)
    return Forecast(
        steps.weights,
        Prediction(speed, speed * (1 - margin), speed * (1 + margin)),
        _exit(steps, early, epsilon) if early.checkpoints else None,
        _lossless(steps, early, prompts) if early.checkpoints else None,
        Prediction(expected, low, high),
        costs.verify_costs,
        steps.disk + KV_TOKENS * steps.kv + PROCESS_BYTES,
        steps.disk,
    )


def pays(prediction: Prediction) -> bool:
    """Tells whether a mode is expected to be faster than full depth by more than a measurement misses."""
    return prediction.expected >= 1 + MACHINE


def exit_seconds(steps: Steps, checkpoints: Sequence[int], exit_at: Sequence[int], max_pending: int) -> float:
    """Returns the seconds of decoding tokens.

    Args:
        exit_at: the index of the checkpoint at which each token exits; the number of checkpoints: none.
        max_pending: tokens that may be pending before a segment.
    """
    sizes = np.diff([0, *checkpoints, steps.depth]).tolist()
    blocks = np.interp(range(len(sizes) * max_pending + 2), list(steps.blocks), list(steps.blocks.values())).tolist()
    waiting, seconds = [0] * len(sizes), 0.0
    for column in exit_at:
        seconds += steps.base + min(column + 1, len(checkpoints)) * steps.router * steps.layer
        new = 1
        for segment, layers in enumerate(sizes):
            if segment > column and waiting[segment] + new <= max_pending:
                waiting[segment] += new
                break
            new, waiting[segment] = waiting[segment] + new, 0
            seconds += layers * steps.layer * blocks[new]
    return seconds


def _exit(steps: Steps, early: Early, epsilon: float) -> Exits:
    """Chooses thresholds on the other parts of the answers for each part."""
    documents = np.unique(early.document)
    parts = [part for fold in range(FOLDS) if len(part := documents[documents % FOLDS == fold])]
    found = []
    for here in parts:
        others = np.setdiff1d(documents, here)
        chosen = _thresholds(steps, early, others, epsilon) if len(others) else None
        found.append((1.0, 0.0, float(early.depth)) if chosen is None else _outcome(steps, early, here, chosen))
    speeds, changed, layers = zip(*found, strict=True)
    return Exits(Prediction(mean(speeds), min(speeds), max(speeds)), mean(changed), mean(layers))


def _outcome(
    steps: Steps, early: Early, documents: np.ndarray, thresholds: Sequence[float]
) -> tuple[float, float, float]:
    """Returns speed over full depth's, changed tokens and layers per token in the answers `documents`."""
    taken = exits(early.scores, thresholds)
    seconds, rows = 0.0, np.isin(early.document, documents)
    for document in documents:
        columns = taken[early.document == document].tolist()
        seconds += exit_seconds(steps, early.checkpoints, columns, MAX_PENDING)
    changed = np.concatenate([early.losses, np.zeros((len(taken), 1))], axis=1)[np.arange(len(taken)), taken]
    layers = np.array([*early.checkpoints, early.depth])[taken]
    return int(rows.sum()) * steps.plain / seconds, float(changed[rows].mean()), float(layers[rows].mean())


def _thresholds(steps: Steps, early: Early, documents: np.ndarray, epsilon: float) -> tuple[float, ...] | None:
    """Returns the fastest thresholds that change at most `epsilon` of the tokens.

    They do so with one standard error to spare. None: none of them is faster than full depth.
    """
    rows = np.isin(early.document, documents)
    tokens, best, best_speed = int(rows.sum()), None, 1.0
    for point in frontier(early.scores[rows], early.losses[rows], early.checkpoints, early.depth):
        if point.loss + sqrt(max(point.loss, 1 / tokens) / tokens) > epsilon:
            break
        speed, _, _ = _outcome(steps, early, documents, point.thresholds)
        if speed > best_speed:
            best, best_speed = point.thresholds, speed
    return best


def _lossless(steps: Steps, early: Early, prompts: Sequence[Sequence[int]]) -> Prediction | None:
    """Chooses a setting on one half of the answers and replays it on the other, both ways."""
    recorded, chosen = early.recorded()
    costs, texts = steps.costs(early.checkpoints), [prompts[number] for number in chosen]
    speeds = []
    for half in range(2):
        here, others = (_every_second(recorded, texts, start) for start in (half, 1 - half))
        if not len(here[0].full) or not len(others[0].full) or here[0].full.shape[1] < 2:
            return None
        setting = best_setting(others[0], costs, others[1])
        drafts = setting.max_drafts or setting.prompt_lookup
        speeds.append(costs.plain / replay(here[0], costs, here[1], setting).seconds if drafts else 1.0)
    return Prediction(mean(speeds), min(speeds), max(speeds))


def _every_second(
    recorded: Measurement, texts: Sequence[Sequence[int]], start: int
) -> tuple[Measurement, list[Sequence[int]]]:
    scores, early, full = (np.ascontiguousarray(a[start::2]) for a in (recorded.scores, recorded.early, recorded.full))
    return replace(recorded, scores=scores, early=early, full=full), list(texts[start::2])
