"""Chooses thresholds for several shares of changed tokens on held-out tokens.

They are chosen on one half of the documents and tested on the other to change at most that share, with one standard
error to spare; a sample too small to show it has no such thresholds. `export` measures their speed (`tuning.auto`),
`tune` certifies thresholds with a guarantee.
"""

from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

import numpy as np

from tide_export.calibration.assessment import Costs, Evaluation
from tide_export.thresholds.pareto import frontier
from tide_export.thresholds.resolve import MAX_THRESHOLD

EPSILONS = (0.005, 0.01, 0.02, 0.05, 0.1)  # maximum shares of tokens that may change


@dataclass(frozen=True)
class OperatingPoint:
    """The cheapest thresholds that change at most a share `epsilon` of the tokens.

    Attributes:
        epsilon: maximum share of changed tokens.
        thresholds: one per checkpoint; all 1.0 if no others passed the test.
        changed: share of tokens that they changed in the test half.
        layers: mean layers per token in the test half.
        saved: share of a full-depth token's operations, including the head, that they saved in the test half, minus the
            cost of routers and lenses; may be negative.
        tokens: number of tokens of the test half.
    """

    epsilon: float
    thresholds: tuple[float, ...]
    changed: float
    layers: float
    saved: float
    tokens: int


def operating_points(evaluation: Evaluation, costs: Costs, min_layers: int) -> list[dict[str, Any]]:
    """Returns one `OperatingPoint` per entry of EPSILONS, as JSON types.

    Args:
        min_layers: checkpoints after fewer layers never exit.
    """
    allowed = np.array(evaluation.checkpoints) >= min_layers
    evaluation = replace(evaluation, scores=np.where(allowed, evaluation.scores, 0.0).astype(np.float32))
    chosen_on, shown_on = _halves(evaluation)
    path = frontier(chosen_on.scores, chosen_on.agrees, evaluation.checkpoints, evaluation.num_layers)
    candidates = [
        tuple(t if may else MAX_THRESHOLD for t, may in zip(p.thresholds, allowed, strict=True)) for p in path
    ]
    points = [asdict(_cheapest(candidates, shown_on, costs, epsilon)) for epsilon in EPSILONS]
    return [point | {"thresholds": list(point["thresholds"])} for point in points]


def _cheapest(
    candidates: list[tuple[float, ...]], evaluation: Evaluation, costs: Costs, epsilon: float
) -> OperatingPoint:
    """Returns the cheapest of the candidates, ordered from the safest, before the first one that fails."""
    tokens, checkpoints = len(evaluation.scores), evaluation.checkpoints
    full = costs.layer * evaluation.num_layers + costs.head
    best = OperatingPoint(epsilon, (MAX_THRESHOLD,) * len(checkpoints), 0.0, float(evaluation.num_layers), 0.0, tokens)
    for thresholds in candidates:
        outcome = evaluation.outcome(thresholds)
        changed = 1 - outcome.agreement
        if changed + sqrt(max(changed, 1 / tokens) / tokens) > epsilon:
            break
        saved = 1 - costs.per_token(outcome, checkpoints) / full
        if saved > best.saved:
            best = OperatingPoint(epsilon, outcome.thresholds, changed, outcome.layers, saved, tokens)
    return best


def _halves(evaluation: Evaluation) -> tuple[Evaluation, Evaluation]:
    """Divides the tokens into halves of similar size between documents; a single document in its middle."""
    _, documents, sizes = np.unique(evaluation.documents, return_inverse=True, return_counts=True)
    if len(sizes) == 1:
        first = np.arange(len(documents)) < len(documents) // 2
        return _part(evaluation, first), _part(evaluation, ~first)
    totals, half = [0, 0], np.zeros(len(sizes), int)
    for document in np.argsort(-sizes, kind="stable"):
        half[document] = int(np.argmin(totals))
        totals[half[document]] += sizes[document]
    return _part(evaluation, half[documents] == 0), _part(evaluation, half[documents] == 1)


def _part(evaluation: Evaluation, rows: np.ndarray) -> Evaluation:
    names = ("scores", "labels", "agrees", "kl", "nll", "documents")
    return replace(evaluation, **{name: getattr(evaluation, name)[rows] for name in names})
