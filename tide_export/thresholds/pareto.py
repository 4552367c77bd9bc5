"""Chooses the thresholds that best trade layers saved against tokens changed, on measured exits.

The calibration report draws its quality-versus-cost curve from them, and `tune` takes its candidates. The input is the
result of every exit for n tokens. NumPy alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_export.thresholds.resolve import MAX_THRESHOLD

SWEEPS = 6
CONSTANT = 1e-3  # scores that differ by less count as equal: no threshold separates them


@dataclass(frozen=True)
class Point:
    """Thresholds and their result on the tokens they were chosen on.

    Attributes:
        thresholds: one per checkpoint, in [0, 1]; at 1.0 nothing exits.
        loss: mean loss: with changed tokens as the losses, their share.
        layers: mean layers per token.
    """

    thresholds: tuple[float, ...]
    loss: float
    layers: float


def exits(scores: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Returns the index of the checkpoint at which each token exits, int64 [n]; C: none.

    Args:
        scores: float [n, C], one column per checkpoint.
        thresholds: one per checkpoint; the first score above its threshold decides.
    """
    passed = np.concatenate([scores > np.asarray(thresholds, dtype=scores.dtype), np.ones((len(scores), 1), bool)], 1)
    return passed.argmax(axis=1)


def constant_routers(scores: np.ndarray, checkpoints: Sequence[int]) -> list[str]:
    """Returns a sentence for each router that gives all n tokens the same score (or NaN), for a warning.

    Args:
        scores: float [n, C], one column per checkpoint.
        checkpoints: layers before each of them.
    """
    return [
        f"the router at checkpoint {layers} gives all {len(column)} tokens the score {column[0]:.3f}: at any threshold "
        "all of them exit there, or none"
        for layers, column in zip(checkpoints, scores.T, strict=True)
        if not np.ptp(column) > CONSTANT
    ]


def measure(
    scores: np.ndarray, losses: np.ndarray, checkpoints: Sequence[int], depth: int, thresholds: Sequence[float]
) -> Point:
    """Measures loss and layers of `thresholds` on n tokens.

    Args:
        scores: float [n, C].
        losses: float [n, C], 0 or more: what an exit there changes, such as `changed_tokens`; full depth's loss is 0.
        checkpoints: layers before each of the C checkpoints, ascending.
        depth: layers of the model.
    """
    exit_at = exits(scores, thresholds)
    lost = np.concatenate([losses, np.zeros((len(losses), 1))], axis=1)[np.arange(len(exit_at)), exit_at]
    layers = np.array([*checkpoints, depth])[exit_at]
    return Point(tuple(float(t) for t in thresholds), float(lost.mean()), float(layers.mean()))


def frontier(
    scores: np.ndarray, losses: np.ndarray, checkpoints: Sequence[int], depth: int, points: int = 40
) -> list[Point]:
    """Finds the Pareto-optimal thresholds, from the safest (nothing exits) to the most aggressive.

    A loss of 1 is given a price in layers, from high to low. Coordinate ascent finds the thresholds that maximize
    layers saved minus the price of the losses: with all others fixed, a checkpoint's best threshold is where
    the running sum of gains, in descending order of score, is highest.

    Args:
        scores, losses, checkpoints, depth: as in `measure`.
        points: number of prices tried.
    """
    columns = len(checkpoints)
    order = np.argsort(-scores, axis=0, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=0)
    thresholds = [MAX_THRESHOLD] * columns
    settings = [measure(scores, losses, checkpoints, depth, thresholds)]
    for price in np.geomspace(4000.0, 0.25, points) * depth / 16:
        for _ in range(SWEEPS):
            before = list(thresholds)
            for k in reversed(range(columns)):
                thresholds[k] = _best(k, scores, losses, checkpoints, depth, thresholds, price, order, ranked)
            if thresholds == before:
                break
        settings.append(measure(scores, losses, checkpoints, depth, thresholds))
    return undominated(settings)


def _best(
    k: int,
    scores: np.ndarray,
    losses: np.ndarray,
    checkpoints: Sequence[int],
    depth: int,
    thresholds: Sequence[float],
    price: float,
    order: np.ndarray,
    ranked: np.ndarray,
) -> float:
    """Returns the threshold of checkpoint k that gains most at this price, with the others fixed."""
    layers = np.array([*checkpoints, depth])
    lost = np.concatenate([losses, np.zeros((len(losses), 1))], axis=1)
    without = [*thresholds]
    without[k] = MAX_THRESHOLD
    otherwise = exits(scores, without)
    gain = layers[otherwise] - layers[k] - price * (lost[:, k] - lost[np.arange(len(lost)), otherwise])
    gain[otherwise < k] = 0.0  # the token exits before checkpoint k
    total = np.cumsum(gain[order[:, k]])
    # A threshold can only lie between two different scores.
    last_of_equal = np.append(ranked[1:, k] < ranked[:-1, k], True)
    total = np.where(last_of_equal, total, -np.inf)
    best = int(total.argmax())
    if total[best] <= 0:
        return MAX_THRESHOLD
    below = ranked[best + 1, k] if best + 1 < len(ranked) else 0.0
    # float32, as the graph compares: the middle of two neighbours must not round to the upper one.
    middle = float(np.float32((float(ranked[best, k]) + float(below)) / 2))
    return middle if middle < ranked[best, k] else float(below)


def undominated(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other point beats, from most to fewest layers."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.layers, p.loss)):
        if not kept or point.loss < kept[-1].loss:
            kept.append(point)
    return kept[::-1]
