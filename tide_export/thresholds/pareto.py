"""Chooses thresholds: the best trade of layers saved against tokens changed, on measured exits.

Used by the calibration report (its quality-versus-cost curve), by `tune` (its path of candidates) and by
`tools/benchmarks/calibration_quality.py`. Its input is the result of every exit for n tokens. NumPy alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_export.thresholds.resolve import MAX_THRESHOLD

SWEEPS = 6
CONSTANT = 1e-3  # a router whose scores differ by less gives no threshold anything to divide


@dataclass(frozen=True)
class Point:
    """One setting and its result on the tokens it was chosen on.

    Attributes:
        thresholds: one per checkpoint, in [0, 1]; at 1.0 nothing exits.
        agreement: share of tokens that are the full model's own top-1.
        layers: mean layers per token.
    """

    thresholds: tuple[float, ...]
    agreement: float
    layers: float


def exits(scores: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Index of the checkpoint each token exits at, int64 [n]; C where it does not.

    Args:
        scores: float [n, C], one column per checkpoint.
        thresholds: C of them; the first score above its threshold decides.
    """
    passed = np.concatenate([scores > np.asarray(thresholds, dtype=scores.dtype), np.ones((len(scores), 1), bool)], 1)
    return passed.argmax(axis=1)


def constant_routers(scores: np.ndarray, checkpoints: Sequence[int]) -> list[str]:
    """Returns a sentence for each router that gives all n tokens the same score (or NaN), for a warning.

    Args:
        scores: float [n, C], one column per checkpoint.
        checkpoints: layers run at each of them.
    """
    return [
        f"the router at checkpoint {layers} gives all {len(column)} tokens the score {column[0]:.3f}: at any threshold "
        "all of them exit there, or none"
        for layers, column in zip(checkpoints, scores.T, strict=True)
        if not np.ptp(column) > CONSTANT
    ]


def measure(
    scores: np.ndarray, agrees: np.ndarray, checkpoints: Sequence[int], depth: int, thresholds: Sequence[float]
) -> Point:
    """The result of `thresholds` on n tokens.

    Args:
        scores: float [n, C].
        agrees: bool [n, C], the exit's top-1 is the full model's.
        checkpoints: layers run at each of the C checkpoints, ascending.
        depth: layers of the model.
    """
    left = exits(scores, thresholds)
    right = np.concatenate([agrees, np.ones((len(agrees), 1), bool)], axis=1)[np.arange(len(left)), left]
    return Point(
        tuple(float(t) for t in thresholds), float(right.mean()), float(np.array([*checkpoints, depth])[left].mean())
    )


def frontier(
    scores: np.ndarray, agrees: np.ndarray, checkpoints: Sequence[int], depth: int, points: int = 40
) -> list[Point]:
    """Settings from the safest (nothing exits) to the most aggressive, none worse than another in both respects.

    For a price of a wrong token in layers, from high to low, the thresholds that maximise layers saved minus the price
    of the tokens changed are found by coordinate ascent: with all others fixed, a checkpoint's best threshold is where
    the running sum of gains, in descending order of score, is highest.

    Args:
        scores, agrees, checkpoints, depth: as in `measure`.
        points: prices tried.
    """
    columns = len(checkpoints)
    order = np.argsort(-scores, axis=0, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=0)
    thresholds = [MAX_THRESHOLD] * columns
    found = [measure(scores, agrees, checkpoints, depth, thresholds)]
    for price in np.geomspace(4000.0, 0.25, points) * depth / 16:
        for _ in range(SWEEPS):
            before = list(thresholds)
            for k in reversed(range(columns)):
                thresholds[k] = _best(k, scores, agrees, checkpoints, depth, thresholds, price, order, ranked)
            if thresholds == before:
                break
        found.append(measure(scores, agrees, checkpoints, depth, thresholds))
    return _undominated(found)


def cheapest(path: Sequence[Point], agreement: float) -> Point:
    """The point of `path` with the fewest layers among those that keep `agreement`; its first where none does."""
    return min((point for point in path if point.agreement >= agreement), key=lambda p: p.layers, default=path[0])


def _best(
    k: int,
    scores: np.ndarray,
    agrees: np.ndarray,
    checkpoints: Sequence[int],
    depth: int,
    thresholds: Sequence[float],
    price: float,
    order: np.ndarray,
    ranked: np.ndarray,
) -> float:
    """The threshold of checkpoint k that gains most at this price, with the others fixed."""
    layers = np.array([*checkpoints, depth])
    wrong = np.concatenate([~agrees, np.zeros((len(agrees), 1), bool)], axis=1)
    without = [*thresholds]
    without[k] = MAX_THRESHOLD
    otherwise = exits(scores, without)
    gain = layers[otherwise] - layers[k] - price * (wrong[:, k].astype(float) - wrong[np.arange(len(wrong)), otherwise])
    gain[otherwise < k] = 0.0  # it exits before checkpoint k
    total = np.cumsum(gain[order[:, k]])
    # Everything above a threshold exits: it can only lie between two different scores.
    last_of_its_score = np.append(ranked[1:, k] < ranked[:-1, k], True)
    total = np.where(last_of_its_score, total, -np.inf)
    best = int(total.argmax())
    if total[best] <= 0:
        return MAX_THRESHOLD
    below = ranked[best + 1, k] if best + 1 < len(ranked) else 0.0
    # float32, as the graph compares: the middle of two neighbours must not round to the upper one.
    middle = float(np.float32((float(ranked[best, k]) + float(below)) / 2))
    return middle if middle < ranked[best, k] else float(below)


def _undominated(found: Sequence[Point]) -> list[Point]:
    """The points that no other beats, from most to fewest layers."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda p: (p.layers, -p.agreement)):
        if not kept or point.agreement > kept[-1].agreement:
            kept.append(point)
    return kept[::-1]
