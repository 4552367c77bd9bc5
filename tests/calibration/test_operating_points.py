"""Thresholds for shares of changed tokens: shown on documents they were not chosen on, and worth their cost."""

from typing import Any

import numpy as np
import pytest

from tide_export.calibration.assessment import Costs, Evaluation
from tide_export.calibration.operating_points import EPSILONS, operating_points
from tide_export.thresholds.pareto import exits

CHECKPOINTS, DEPTH = (2, 4, 6), 8
CHEAP = Costs(layer=100.0, head=100.0, router=1.0, lens=0.0)


def evaluation(tokens: int = 20000, documents: int = 10, seed: int = 0) -> Evaluation:
    """Scores that are the probability that the exit agrees."""
    random = np.random.default_rng(seed)
    scores = np.sort(random.beta(2, 1, (tokens, 3)), axis=1).astype(np.float32)
    agrees = random.random((tokens, 3)) < scores
    nll = np.zeros((tokens, 4), np.float32)
    return Evaluation(
        DEPTH, CHECKPOINTS, scores, agrees, agrees, nll[:, :3], nll, random.integers(0, documents, tokens)
    )


def changed(of: Evaluation, thresholds: Any) -> float:
    taken = exits(of.scores, thresholds)
    right = np.concatenate([of.agrees, np.ones((len(taken), 1), bool)], axis=1)
    return 1 - float(right[np.arange(len(taken)), taken].mean())


def test_every_share_is_kept_on_text_like_it_and_a_larger_one_saves_more() -> None:
    points = operating_points(evaluation(), CHEAP, min_layers=0)
    fresh = evaluation(seed=1)
    assert [point["epsilon"] for point in points] == list(EPSILONS)
    assert all(changed(fresh, p["thresholds"]) < 1.15 * p["epsilon"] and p["changed"] < p["epsilon"] for p in points)
    saved = [point["saved"] for point in points]
    assert sorted(saved) == saved
    assert saved[0] > 0.01
    assert [point["layers"] for point in points] == sorted((p["layers"] for p in points), reverse=True)


def test_what_exits_save_is_less_routers_lenses_and_the_head() -> None:
    def saved(costs: Costs) -> float:
        return operating_points(evaluation(), costs, 0)[2]["saved"]

    assert saved(Costs(100.0, 800.0, 1.0, 0.0)) < 0.6 * saved(CHEAP)
    assert saved(Costs(100.0, 100.0, 1.0, 10.0)) < saved(CHEAP)
    dear = operating_points(evaluation(), Costs(100.0, 100.0, 50.0, 500.0), 0)
    assert [p["saved"] for p in dear] == [0.0] * 5
    assert [p["thresholds"] for p in dear] == [[1.0, 1.0, 1.0]] * 5


def test_too_little_text_shows_nothing() -> None:
    points = operating_points(evaluation(tokens=200), CHEAP, 0)
    assert points[0]["thresholds"] == [1.0, 1.0, 1.0]
    assert points[0]["tokens"] in range(60, 140)


@pytest.mark.parametrize("documents", [1, 2])
def test_thresholds_are_shown_on_other_tokens_than_they_are_chosen_on(documents: int) -> None:
    """Half of the documents agree everywhere, the others nowhere: whichever half chooses, nothing may exit."""
    first = np.arange(2000) < 1000
    agrees = np.repeat(first[:, None], 3, axis=1)
    scores, nll = np.full((2000, 3), 0.9, np.float32), np.zeros((2000, 4), np.float32)
    of = np.zeros(2000, int) if documents == 1 else (~first).astype(int)
    points = operating_points(Evaluation(DEPTH, CHECKPOINTS, scores, agrees, agrees, nll[:, :3], nll, of), CHEAP, 0)
    assert all(p["changed"] <= p["epsilon"] for p in points)
    assert all(p["thresholds"] == [1.0, 1.0, 1.0] for p in points)


def test_min_layers_is_kept_to() -> None:
    for point in operating_points(evaluation(), CHEAP, min_layers=4):
        assert point["thresholds"][0] == 1.0
    assert operating_points(evaluation(), CHEAP, min_layers=0)[4]["thresholds"][0] < 1.0
