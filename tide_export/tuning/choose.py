"""From measurements to one setting: candidates from the path's prompts, tested in order on the calibration's.

The two halves must not touch: which candidates there are, and in which order, is fixed before the first calibration
loss is looked at.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tide_export.thresholds.pareto import Point, frontier, measure
from tide_export.tuning.guarantee import walk
from tide_export.tuning.measure import Measurement

MOST_CANDIDATES = 30
PRICES = 120  # settings the frontier is looked for with; the candidates are taken from what it finds
STEP = 0.05  # times epsilon: how far apart the path risks of two candidates may lie
HALVINGS = 5  # of the way between two settings at most, to get there
HOPELESS = 1.5  # times epsilon: a setting that was wrong this often on the path cannot pass


@dataclass(frozen=True)
class Tested:
    """A candidate that was tested.

    Attributes:
        thresholds: one per checkpoint that may exit.
        path_risk: mean loss on the path's prompts, which it was chosen on (so rather too low).
        risk: mean loss on the calibration's.
        p_value: of "the true risk is above epsilon".
        layers: mean layers per token on the calibration's prompts.
        passed: p_value <= delta, as of all before it.
    """

    thresholds: tuple[float, ...]
    path_risk: float
    risk: float
    p_value: float
    layers: float
    passed: bool


def candidates(path: Measurement, epsilon: float, most: int = MOST_CANDIDATES) -> list[Point]:
    """Settings to test, from the safest that lets anything leave to the most aggressive; at most `most`."""
    columns = path.scores.shape[-1]
    scores, agrees = path.scores.reshape(-1, columns), path.agrees.reshape(-1, columns)
    found = [p for p in frontier(scores, agrees, path.layers, path.depth, PRICES) if p.layers < path.depth]
    found = found[:1] + [point for point in found[1:] if 1 - point.agreement <= HOPELESS * epsilon]
    for before, after in pairwise(list(found)):
        found += _between(before, after, path, STEP * epsilon, HALVINGS)
    found.sort(key=lambda point: (-point.agreement, -point.layers))
    if len(found) <= most:
        return found
    risks = np.array([1 - point.agreement for point in found])
    nearest = {int(np.abs(risks - target).argmin()) for target in np.linspace(risks[0], risks[-1], most)}
    return [found[i] for i in sorted(nearest)]


def _between(before: Point, after: Point, path: Measurement, step: float, halvings: int) -> list[Point]:
    """Settings halfway, until two neighbours' risks are no further apart than `step`: the walk can end near epsilon."""
    if halvings == 0 or before.agreement - after.agreement <= step:
        return []
    columns = path.scores.shape[-1]
    scores, agrees = path.scores.reshape(-1, columns), path.agrees.reshape(-1, columns)
    halfway = (np.array(before.thresholds) / 2 + np.array(after.thresholds) / 2).astype(np.float32).tolist()
    point = measure(scores, agrees, path.layers, path.depth, halfway)
    return [
        *_between(before, point, path, step, halvings - 1),
        point,
        *_between(point, after, path, step, halvings - 1),
    ]


def certify(
    calibration: Measurement, path: list[Point], epsilon: float, delta: float, binary: bool = False
) -> list[Tested]:
    """Tests candidates in order, up to and including the first that fails; the last that passed may be used.

    With probability 1 - `delta` or more over the calibration's prompts, what passed has a true risk of at most
    `epsilon` (Learn then Test, fixed sequence). For `binary` see `p_value`.
    """
    p_values = walk((calibration.losses(point.thresholds) for point in path), epsilon, delta, binary)
    return [_tested(calibration, point, p, delta) for point, p in zip(path, p_values, strict=False)]


def _tested(calibration: Measurement, point: Point, p: float, delta: float) -> Tested:
    _, layers = calibration.outcome(point.thresholds)
    return Tested(
        thresholds=point.thresholds,
        path_risk=1 - point.agreement,
        risk=float(calibration.losses(point.thresholds).mean()),
        p_value=p,
        layers=float(layers.mean()),
        passed=p <= delta,
    )
