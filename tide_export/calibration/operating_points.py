"""Chooses thresholds for several bounds of changed tokens and of perplexity, on held-out tokens.

They are chosen on one half of the documents and tested on the other to keep to both bounds, with one standard error to
spare; a sample too small to show it has no such thresholds. `export` measures their speed (`tuning.auto`), `tune`
certifies thresholds with a guarantee.
"""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tide_export.calibration.assessment import Costs, Evaluation, Outcome
from tide_export.thresholds.pareto import frontier
from tide_export.thresholds.resolve import MAX_THRESHOLD

EPSILONS = (0.005, 0.01, 0.02, 0.05, 0.1)  # bounds of changed tokens, and of the change of perplexity


@dataclass(frozen=True)
class OperatingPoint:
    """The cheapest thresholds that keep to a bound of changed tokens and to one of perplexity.

    Attributes:
        epsilon: maximum share of changed tokens.
        perplexity_epsilon: maximum change of perplexity.
        thresholds: one per checkpoint; all 1.0 if no others passed the test.
        temperature, tokens, changed, changed_error, perplexity, perplexity_error: the `Change` in the test half.
        documents: number of documents of the test half.
        layers: mean layers per token in the test half.
        saved: share of a full-depth token's operations, including the head, that they saved in the test half, minus the
            cost of routers and lenses; may be negative.
    """

    epsilon: float
    perplexity_epsilon: float
    thresholds: list[float]
    temperature: float
    tokens: int
    changed: float
    changed_error: float
    perplexity: float
    perplexity_error: float
    documents: int
    layers: float
    saved: float


def operating_points(evaluation: Evaluation, costs: Costs, min_layers: int) -> list[dict[str, Any]]:
    """Returns one `OperatingPoint` per pair of EPSILONS, as JSON types.

    Args:
        min_layers: checkpoints after fewer layers never exit.
    """
    allowed = np.array(evaluation.checkpoints) >= min_layers
    evaluation = replace(evaluation, scores=np.where(allowed, evaluation.scores, 0.0).astype(np.float32))
    chosen_on, shown_on = _halves(evaluation)
    losses = chosen_on.changed + chosen_on.added.clip(0)  # both are bounded, so both have a price
    path = frontier(chosen_on.scores, losses, evaluation.checkpoints, evaluation.num_layers)
    candidates = [
        shown_on.outcome([t if may else MAX_THRESHOLD for t, may in zip(p.thresholds, allowed, strict=True)])
        for p in path
    ]
    nothing = shown_on.outcome([MAX_THRESHOLD] * len(allowed))
    documents = len(np.unique(shown_on.documents))
    points = []
    for epsilon, perplexity_epsilon in product(EPSILONS, EPSILONS):
        best, saved = nothing, 0.0
        for outcome in candidates:  # from the safest, up to the first that fails
            if not outcome.change.within(epsilon, perplexity_epsilon):
                break
            if _saved(outcome, costs, evaluation) > saved:
                best, saved = outcome, _saved(outcome, costs, evaluation)
        thresholds, change = list(best.thresholds), asdict(best.change)
        point = OperatingPoint(
            epsilon, perplexity_epsilon, thresholds, **change, documents=documents, layers=best.layers, saved=saved
        )
        points.append(asdict(point))
    return points


def _saved(outcome: Outcome, costs: Costs, evaluation: Evaluation) -> float:
    full = costs.layer * evaluation.num_layers + costs.head
    return 1 - costs.per_token(outcome, evaluation.checkpoints) / full


def _halves(evaluation: Evaluation) -> tuple[Evaluation, Evaluation]:
    """Divides the tokens into halves of similar size between documents; a single document in its middle."""
    _, documents, sizes = np.unique(evaluation.documents, return_inverse=True, return_counts=True)
    if len(sizes) == 1:
        first = np.arange(len(documents)) < len(documents) // 2
        return evaluation.part(first), evaluation.part(~first)
    totals, half = [0, 0], np.zeros(len(sizes), int)
    for document in np.argsort(-sizes, kind="stable"):
        half[document] = int(np.argmin(totals))
        totals[half[document]] += sizes[document]
    return evaluation.part(half[documents] == 0), evaluation.part(half[documents] == 1)
