"""Chooses candidate thresholds on the path prompts and tests them in order on the calibration prompts.

The candidates and their order are fixed before the first calibration loss is computed.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from tide_export.common.changed_tokens import Change
from tide_export.thresholds.pareto import Point, frontier, measure
from tide_export.tuning.guarantee import best_bet, fixed_sequence_test, p_value
from tide_export.tuning.measure import Measurement

MAX_CANDIDATES = 30
PRICES = 120  # tried for the frontier of candidates
STEP = 0.05  # times epsilon: largest difference of path risk between neighbouring candidates
MAX_HALVINGS = 5  # of the interval between two settings, to reach STEP
MAX_PATH_RISK = 1.5  # times epsilon: a setting with a higher path risk would not pass


@dataclass(frozen=True)
class Tested:
    """A candidate and the result of its test.

    Attributes:
        thresholds: one per checkpoint that may exit.
        path_risk: changed tokens on the path prompts, on which it was chosen (so biased low).
        risk: changed tokens on the calibration prompts: the mean of the prompts' losses.
        bet: the bet of the test (`guarantee.best_bet` of the path losses); None: the binomial test.
        p_value: of the hypothesis that the true risk is above epsilon; 1 if the change of perplexity, with a standard
            error, is above its bound.
        change: changed tokens and the change of perplexity on the calibration prompts, errors over prompts.
        layers: mean layers per token on the calibration prompts.
        passed: p_value <= delta; also true of all candidates before it.
    """

    thresholds: tuple[float, ...]
    path_risk: float
    risk: float
    bet: float | None
    p_value: float
    change: Change
    layers: float
    passed: bool


def candidates(path: Measurement, epsilon: float, max_candidates: int = MAX_CANDIDATES) -> list[Point]:
    """Returns the settings to test, from the safest with any exits to the most aggressive."""
    columns = path.scores.shape[-1]
    scores, changed = path.scores.reshape(-1, columns), path.changed.reshape(-1, columns)
    points = [p for p in frontier(scores, changed, path.layers, path.depth, PRICES) if p.layers < path.depth]
    points = points[:1] + [point for point in points[1:] if point.loss <= MAX_PATH_RISK * epsilon]
    for before, after in pairwise(list(points)):
        points += _between(before, after, path, STEP * epsilon, MAX_HALVINGS)
    points.sort(key=lambda point: (point.loss, -point.layers))
    if len(points) <= max_candidates:
        return points
    risks = np.array([point.loss for point in points])
    nearest = {int(np.abs(risks - target).argmin()) for target in np.linspace(risks[0], risks[-1], max_candidates)}
    return [points[i] for i in sorted(nearest)]


def _between(before: Point, after: Point, path: Measurement, step: float, halvings: int) -> list[Point]:
    """Adds settings halfway until the risks of neighbours differ by at most `step`.

    So the tests can end near epsilon.
    """
    if halvings == 0 or after.loss - before.loss <= step:
        return []
    columns = path.scores.shape[-1]
    scores, changed = path.scores.reshape(-1, columns), path.changed.reshape(-1, columns)
    halfway = (np.array(before.thresholds) / 2 + np.array(after.thresholds) / 2).astype(np.float32).tolist()
    point = measure(scores, changed, path.layers, path.depth, halfway)
    return [
        *_between(before, point, path, step, halvings - 1),
        point,
        *_between(point, after, path, step, halvings - 1),
    ]


def certify(
    path: Measurement,
    calibration: Measurement,
    points: list[Point],
    epsilon: float,
    delta: float,
    perplexity_epsilon: float = inf,
    binary: bool = False,
) -> list[Tested]:
    """Tests candidates in order, up to and including the first that fails.

    The last that passed may be used: with probability 1 - `delta` or more over the calibration prompts, its true risk
    is at most `epsilon` (Learn then Test, fixed sequence). A candidate that breaks the bound of perplexity fails, too:
    to stop earlier takes nothing from the guarantee.

    Args:
        path: the measurement that `points` were chosen on.
        perplexity_epsilon: largest change of perplexity, measured on the calibration prompts with a standard error to
            spare: no guarantee.
        binary: each loss is 0 or 1, and no two come from one document: the test is the exact binomial one.
    """
    settings = [(point, None if binary else best_bet(path.losses(point.thresholds), epsilon)) for point in points]

    def test(point: Point, bet: float | None) -> float:
        change = calibration.change(point.thresholds)
        if change.perplexity + change.perplexity_error > perplexity_epsilon:
            return 1.0
        return p_value(calibration.losses(point.thresholds), epsilon, bet)

    p_values = fixed_sequence_test((test(point, bet) for point, bet in settings), delta)
    return [
        Tested(
            thresholds=point.thresholds,
            path_risk=point.loss,
            risk=float(calibration.losses(point.thresholds).mean()),
            bet=bet,
            p_value=p,
            change=calibration.change(point.thresholds),
            layers=float(calibration.outcome(point.thresholds)[1].mean()),
            passed=p <= delta,
        )
        for (point, bet), p in zip(settings, p_values, strict=False)
    ]
