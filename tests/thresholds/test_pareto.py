"""The best thresholds: measured as a count token by token, found as a search of all of them finds, none dominated."""

import itertools

import numpy as np
import pytest

from tide_export.thresholds.pareto import Point, constant_routers, exits, frontier, measure
from tide_export.thresholds.resolve import MAX_THRESHOLD

DEPTH = 12


def perfect_layers(changed, checkpoints, depth):
    """Mean layers per token of a perfect router: every token leaves at the first checkpoint that does not change it."""
    first = np.concatenate([~changed, np.ones((len(changed), 1), bool)], axis=1).argmax(axis=1)
    return float(np.array([*checkpoints, depth])[first].mean())


def made_up(tokens, columns, seed, knowledge=1.0):
    """Scores that know something about which tokens an exit changes, with ties."""
    random = np.random.default_rng(seed)
    changed = random.uniform(size=(tokens, columns)) >= np.linspace(0.5, 0.9, columns)
    noise = random.normal(size=changed.shape)
    scores = 1 / (1 + np.exp(-(knowledge * (1 - 2.0 * changed) + noise)))
    return np.round(scores, 2).astype(np.float32), changed, tuple(range(3, 3 * columns + 1, 3))


def by_hand(scores, losses, checkpoints, depth, thresholds):
    """(loss, layers) one token at a time."""
    lost, layers = 0.0, 0
    for row, loss in zip(scores, losses, strict=True):
        left = next((k for k, s in enumerate(row) if s > np.float32(thresholds[k])), None)
        lost += 0.0 if left is None else float(loss[left])
        layers += depth if left is None else checkpoints[left]
    return lost / len(scores), layers / len(scores)


def every_setting(scores):
    """One threshold between any two neighbouring scores of each checkpoint, below all, and off."""
    columns = []
    for k in range(scores.shape[1]):
        ranked = np.unique(scores[:, k])
        columns.append([0.0, *((ranked[1:] + ranked[:-1]) / 2).tolist(), MAX_THRESHOLD])
    return itertools.product(*columns)


@pytest.mark.parametrize(
    "thresholds", [(0.5, 0.5, 0.5), (MAX_THRESHOLD, 0.3, MAX_THRESHOLD), (0.0, 0.0, 0.0), (0.9, MAX_THRESHOLD, 0.1)]
)
def test_measure_is_a_count_token_by_token(thresholds):
    scores, changed, checkpoints = made_up(200, 3, 0)
    losses = changed * np.random.default_rng(1).gamma(1.0, 1.0, changed.shape)  # of any size
    known = scores, losses, checkpoints, DEPTH
    found = measure(*known, thresholds)
    assert found.thresholds == thresholds
    assert (found.loss, found.layers) == pytest.approx(by_hand(*known, thresholds))


def test_the_first_score_above_its_threshold_decides():
    scores = np.array([[0.9, 0.9], [0.1, 0.9], [0.1, 0.1], [0.5, 0.5]], np.float32)
    assert exits(scores, [0.5, 0.5]).tolist() == [0, 1, 2, 2]
    assert exits(scores, [MAX_THRESHOLD, MAX_THRESHOLD]).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(6))
def test_one_checkpoints_thresholds_are_those_of_a_search_of_all(seed):
    """Each is the best there is at some price: above it nothing saves more for what it changes."""
    known = (*made_up(40, 1, seed), DEPTH)
    everything = [measure(*known, thresholds) for thresholds in every_setting(known[0])]
    found = frontier(*known, points=60)
    for price in np.geomspace(4000.0, 0.25, 60) * DEPTH / 16:
        best = max((DEPTH - point.layers) - price * (point.loss) for point in everything)
        assert max((DEPTH - point.layers) - price * (point.loss) for point in found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_two_checkpoints_thresholds_are_beaten_by_none_of_a_grid(seed):
    known = (*made_up(16, 2, seed, knowledge=2.0), DEPTH)
    everything = [measure(*known, thresholds) for thresholds in every_setting(known[0])]
    for point in frontier(*known):
        better = [
            other
            for other in everything
            if (other.loss <= point.loss - 1e-9 and other.layers <= point.layers + 1e-9)
            or (other.loss <= point.loss + 1e-9 and other.layers <= point.layers - 1e-9)
        ]
        assert not better, (point, better[:2])


@pytest.mark.parametrize(("columns", "seed"), [(1, 0), (3, 1), (3, 2), (5, 3)])
def test_points_are_as_measured_in_order_and_none_is_dominated(columns, seed):
    known = (*made_up(2000, columns, seed), 3 * columns + 3)
    found = frontier(*known)
    assert len(found) > 3
    for point in found:
        again = measure(*known, point.thresholds)
        assert (point.loss, point.layers) == (again.loss, again.layers)
        assert all(0.0 <= threshold <= 1.0 for threshold in point.thresholds)
    for careful, bold in itertools.pairwise(found):
        assert bold.layers < careful.layers
        assert bold.loss > careful.loss
    assert found[0].loss == 0.0  # at the highest price no token may change


def test_scores_that_know_everything_cost_nothing():
    _, changed, checkpoints = made_up(500, 3, 0)
    found = frontier(0.9 - changed.astype(np.float32) * 0.8, changed, checkpoints, DEPTH)
    assert found[0].loss == 0.0
    assert found[0].layers == pytest.approx(perfect_layers(changed, checkpoints, DEPTH))


def test_scores_that_know_nothing_save_nothing_for_sure():
    changed = np.random.default_rng(0).uniform(size=(400, 1)) < 0.5
    found = frontier(np.full((400, 1), 0.5, np.float32), changed, (3,), DEPTH)
    assert found[0] == Point((MAX_THRESHOLD,), 0.0, float(DEPTH))
    assert {point.layers for point in found} <= {float(DEPTH), 3.0}


def test_thresholds_part_neighbours_in_float32_too():
    """The middle of two neighbouring float32 numbers is one of them: it must be the lower one."""
    low = np.float32(0.7)
    high = np.nextafter(low, np.float32(1.0))
    scores = np.array([[high]] * 50 + [[low]] * 50, np.float32)
    changed = np.array([[False]] * 50 + [[True]] * 50)
    found = frontier(scores, changed, (3,), DEPTH)
    assert found[0].loss == 0.0
    assert found[0].layers == (3 + DEPTH) / 2


def test_a_router_is_constant_where_no_threshold_divides_its_tokens():
    scores = np.array([[0.2, 0.9, 0.5, np.nan], [0.7, 0.9, 0.5004, 0.5]], np.float32)
    warnings = constant_routers(scores, (3, 6, 9, 12))
    assert [sentence.split(" gives ")[0] for sentence in warnings] == [
        f"the router at checkpoint {layers}" for layers in (6, 9, 12)
    ]
