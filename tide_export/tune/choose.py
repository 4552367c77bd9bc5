"""From measurements to one setting: candidates from the path's prompts, tested in order on the calibration's.

The two halves must not touch: which candidates there are, and in which order, is fixed before the first calibration
loss is looked at.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np

from tide_export.frontier import Point, frontier, measure
from tide_export.tune.guarantee import walk
from tide_export.tune.measure import Measurement

MOST_CANDIDATES = 30
PRICES = 120  # settings the frontier is looked for with; the candidates are taken from what it finds
STEP = 0.1  # times epsilon: how far apart the path risks of two candidates may lie
HOPELESS = 2.0  # times epsilon: a setting that was wrong this often on the path cannot pass


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
    found = _with_steps(found, path, epsilon * STEP)
    if len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def _with_steps(found: list[Point], path: Measurement, step: float) -> list[Point]:
    """Adds settings between neighbours whose risks lie further apart than `step`: the walk can end near epsilon."""
    columns = path.scores.shape[-1]
    scores, agrees = path.scores.reshape(-1, columns), path.agrees.reshape(-1, columns)
    dense = found[:1]
    for before, after in pairwise(found):
        parts = min(MOST_CANDIDATES, ceil((before.agreement - after.agreement) / step))
        start, end = np.array(before.thresholds), np.array(after.thresholds)
        for i in range(1, parts):
            thresholds = (start + (end - start) * i / parts).astype(np.float32).tolist()
            dense.append(measure(scores, agrees, path.layers, path.depth, thresholds))
        dense.append(after)
    return dense


def certify(calibration: Measurement, path: list[Point], epsilon: float, delta: float) -> list[Tested]:
    """Tests candidates in order, up to and including the first that fails; the last that passed may be used.

    With probability 1 - `delta` or more over the calibration's prompts, what passed has a true risk of at most
    `epsilon` (Learn then Test, fixed sequence).
    """
    binary = calibration.full.shape[1] == 1  # one position: by design, not by what was seen (see `p_value`)
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
