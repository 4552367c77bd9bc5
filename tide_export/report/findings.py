"""Computes the numbers of the report: results of thresholds on tokens they were not chosen on.

Thresholds are chosen on one half of the held-out documents and measured on the other, because the best of many
thresholds looks better than it is on the tokens it was chosen on. NumPy alone; the model is not run again.
"""

from dataclasses import dataclass, replace

import numpy as np

from tide_export.calibration.assessment import Assessment, Costs, Evaluation, Outcome
from tide_export.calibration.calibration_error import Reliability, reliability
from tide_export.calibration.operating_points import EPSILONS
from tide_export.errors import CalibrationError
from tide_export.thresholds.pareto import Point, constant_routers, frontier, measure, undominated
from tide_export.thresholds.resolve import MAX_THRESHOLD

SMALLER_HALF = 0.25  # of all tokens; with less, one document is nearly all of the text


@dataclass(frozen=True)
class Choice:
    """Thresholds chosen for a bound of both changes, and their result on the other half.

    Attributes:
        epsilon: largest share of changed tokens, and change of perplexity, on the half they were chosen on.
        outcome: the result on the other half.
        flops: operations per token, routers and lenses included.
        efficiency: layers saved relative to those a perfect router saves; NaN if that saves none.
    """

    epsilon: float
    outcome: Outcome
    flops: float
    efficiency: float


@dataclass(frozen=True)
class RouterFinding:
    """Result of one router on all held-out tokens, those that would have exited before included.

    Attributes:
        checkpoint: layers before it.
        threshold: the bundle's default; at 1 nothing exits.
        changed: share of changed tokens if every token exits here.
        positive_rate: share of tokens that may exit by the label.
        mean_score: mean of the scores.
        recall_curve, precision_curve: at every distinct threshold, from the highest; empty if none may exit.
        precision, recall: at `threshold`; NaN if no score is above it, or none may exit.
        reliability: scores against labels.
    """

    checkpoint: int
    threshold: float
    changed: float
    positive_rate: float
    mean_score: float
    recall_curve: np.ndarray
    precision_curve: np.ndarray
    precision: float
    recall: float
    reliability: Reliability


@dataclass(frozen=True)
class Findings:
    """Holds all numbers of the report.

    Attributes:
        unit: the unit of the halves: `documents`, or `tokens` if there are too few documents.
        documents: number of documents.
        chosen_on, measured_on: tokens of the two halves.
        full_flops: operations of a token that runs all layers and no router.
        choices: one per target, from the most careful.
        curve: the best thresholds from careful to bold, chosen on one half, measured on the other.
        sweep: one threshold for all checkpoints, measured on the same half as `curve`.
        fixed: per checkpoint, all tokens exit there without a router: the naive baseline.
        perfect: every token exits at the first checkpoint whose likeliest token is full depth's.
        default: the bundle's thresholds on all held-out tokens.
        default_measured: the bundle's thresholds on the measured half, to compare with the curves.
        routers: one per checkpoint.
        warnings: a sentence for each router that gives all tokens the same score.
    """

    unit: str
    documents: int
    chosen_on: int
    measured_on: int
    full_flops: float
    choices: tuple[Choice, ...]
    curve: tuple[Outcome, ...]
    sweep: tuple[Outcome, ...]
    fixed: tuple[Outcome, ...]
    perfect: Outcome
    default: Outcome
    default_measured: Outcome
    routers: tuple[RouterFinding, ...]
    warnings: tuple[str, ...]

    def choice(self, epsilon: float) -> Choice:
        """Returns the choice for one of `EPSILONS`."""
        return next(choice for choice in self.choices if choice.epsilon == epsilon)


def investigate(assessment: Assessment) -> Findings:
    """Computes all numbers of the report.

    Raises:
        CalibrationError: there are fewer than two held-out tokens.
    """
    evaluation, costs = assessment.evaluation, assessment.costs
    if len(evaluation.documents) < 2:
        raise CalibrationError("a report needs at least two held-out tokens: calibrate on more text")
    chosen_on, measured_on, unit = halves(evaluation)
    depth, checkpoints = evaluation.num_layers, evaluation.checkpoints
    points = candidates(chosen_on)
    tried = [chosen_on.outcome(point.thresholds) for point in points]
    perfect = perfect_outcome(measured_on)

    def choose(epsilon: float) -> Choice:
        kept = [one for one in tried if max(one.change.changed, one.change.perplexity) <= epsilon]
        outcome = measured_on.outcome(min(kept, key=lambda one: one.layers).thresholds)
        possible = depth - perfect.layers
        efficiency = (depth - outcome.layers) / possible if possible > 0 else float("nan")
        return Choice(epsilon, outcome, costs.per_token(outcome, checkpoints), efficiency)

    return Findings(
        unit=unit,
        documents=len(np.unique(evaluation.documents)),
        chosen_on=len(chosen_on.documents),
        measured_on=len(measured_on.documents),
        full_flops=costs.layer * depth + costs.head,
        choices=tuple(map(choose, EPSILONS)),
        curve=tuple(measured_on.outcome(point.thresholds) for point in undominated(points)),
        sweep=tuple(measured_on.outcome([t] * len(checkpoints)) for t in sweep_thresholds(measured_on.scores)),
        fixed=tuple(fixed_outcome(measured_on, k) for k in range(len(checkpoints))),
        perfect=perfect,
        default=evaluation.outcome(assessment.thresholds),
        default_measured=measured_on.outcome(assessment.thresholds),
        routers=tuple(_router(evaluation, k, assessment.thresholds[k]) for k in range(len(checkpoints))),
        warnings=tuple(constant_routers(evaluation.scores, checkpoints)),
    )


def halves(evaluation: Evaluation) -> tuple[Evaluation, Evaluation, str]:
    """Divides the tokens into two parts of about equal size; returns them and the unit divided.

    Documents, the longest first, go to the smaller part, so the division does not depend on chance. The unit is
    `documents`, or `tokens` if the parts would be too unequal.
    """
    documents, sizes = np.unique(evaluation.documents, return_counts=True)
    first: list[int] = []
    filled = [0, 0]
    for i in np.argsort(-sizes, kind="stable"):
        part = int(filled[1] < filled[0])
        filled[part] += int(sizes[i])
        if part == 0:
            first.append(int(documents[i]))
    if min(filled) >= SMALLER_HALF * len(evaluation.documents):
        chosen = np.isin(evaluation.documents, first)
        return evaluation.part(chosen), evaluation.part(~chosen), "documents"
    chosen = np.arange(len(evaluation.documents)) < len(evaluation.documents) // 2
    return evaluation.part(chosen), evaluation.part(~chosen), "tokens"


def candidates(evaluation: Evaluation) -> list[Point]:
    """Returns settings for these tokens; a token's loss is its change plus the log-loss it adds.

    The first exits nowhere. Those of `frontier` are for that loss and for changed tokens alone; single thresholds are
    added, because `frontier` finds only the convex hull: settings between two others that are worse than a random
    mixture of both are missing.
    """
    changed, losses = evaluation.changed, evaluation.changed + evaluation.added.clip(0)
    layers = evaluation.checkpoints, evaluation.num_layers
    tried = [[MAX_THRESHOLD] * len(evaluation.checkpoints)]
    tried += [[float(t)] * len(evaluation.checkpoints) for t in sweep_thresholds(evaluation.scores)]
    tried += [
        list(point.thresholds) for one in (changed, losses) for point in frontier(evaluation.scores, one, *layers)
    ]
    return [measure(evaluation.scores, losses, *layers, thresholds) for thresholds in tried]


def perfect_outcome(evaluation: Evaluation) -> Outcome:
    """Computes the result if all exit at the first checkpoint whose likeliest token is full depth's."""
    knowing = replace(evaluation, scores=evaluation.unchanged.astype(np.float32))
    return knowing.outcome([0.5] * len(evaluation.checkpoints))


def fixed_outcome(evaluation: Evaluation, k: int) -> Outcome:
    """Computes the result if every token exits at checkpoint number `k`."""
    columns = len(evaluation.checkpoints)
    always = np.zeros_like(evaluation.scores)
    always[:, k] = 1.0
    return replace(evaluation, scores=always).outcome([0.5] * columns)


def fixed_flops(costs: Costs, outcome: Outcome) -> float:
    """Computes the operations of a token that exits at a fixed checkpoint: no router, at most one lens."""
    return costs.layer * outcome.layers + costs.head + costs.lens


def sweep_thresholds(scores: np.ndarray) -> np.ndarray:
    """Returns thresholds to try for all checkpoints alike: evenly spaced ones and quantiles of the scores."""
    even = np.linspace(0.0, 1.0, 41)
    return np.unique(np.concatenate([even, np.quantile(scores, even).clip(0.0, MAX_THRESHOLD)]))[::-1]


def precision_recall(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes recall and precision of `score >= s` for every distinct score s, from the highest.

    Both are float64 [distinct scores]; empty if no label is true.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(labels[order])
    if not len(hits) or hits[-1] == 0:
        return np.empty(0), np.empty(0)
    last = np.append(ranked[1:] < ranked[:-1], True)
    return hits[last] / hits[-1], (hits / np.arange(1, len(hits) + 1))[last]


def _router(evaluation: Evaluation, k: int, threshold: float) -> RouterFinding:
    scores, labels = evaluation.scores[:, k], evaluation.labels[:, k]
    recall_curve, precision_curve = precision_recall(scores, labels)
    # In the precision of the scores, as the graph compares.
    exited = scores > np.asarray(threshold, dtype=scores.dtype)
    right = float((exited & labels).sum())
    return RouterFinding(
        checkpoint=evaluation.checkpoints[k],
        threshold=float(threshold),
        changed=float(evaluation.changed[:, k].mean()),
        positive_rate=float(labels.mean()),
        mean_score=float(scores.mean()),
        recall_curve=recall_curve,
        precision_curve=precision_curve,
        precision=right / float(exited.sum()) if exited.any() else float("nan"),
        recall=right / float(labels.sum()) if labels.any() else float("nan"),
        reliability=reliability(scores, labels),
    )
