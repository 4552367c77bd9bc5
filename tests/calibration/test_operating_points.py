"""Thresholds for bounds of what exits change: shown on documents they were not chosen on, and worth their cost."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from tide_export.calibration.assessment import Costs, Evaluation
from tide_export.calibration.operating_points import EPSILONS, operating_points

CHECKPOINTS, DEPTH = (2, 4, 6), 8
CHEAP = Costs(layer=100.0, head=100.0, router=1.0, lens=0.0)


def evaluation(tokens: int = 20000, documents: int = 10, seed: int = 0, added: float = 0.0) -> Evaluation:
    """Scores that are the probability that the token is unchanged; a changed one adds `added` nats."""
    random = np.random.default_rng(seed)
    scores = np.sort(random.beta(2, 1, (tokens, 3)), axis=1).astype(np.float32)
    changed = (random.random((tokens, 3)) >= scores).astype(np.float32)
    return made_of(scores, changed, added * changed, random.integers(0, documents, tokens))


def made_of(scores: np.ndarray, changed: np.ndarray, added: np.ndarray, documents: np.ndarray) -> Evaluation:
    unchanged, kl = changed == 0, np.zeros(scores.shape, np.float32)
    return Evaluation(DEPTH, CHECKPOINTS, scores, unchanged, unchanged, kl, changed, added, documents, 0.8)


def of_both(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points with the same bound of changed tokens and of perplexity."""
    return [point for point in points if point["epsilon"] == point["perplexity_epsilon"]]


def test_every_share_is_kept_on_text_like_it_and_a_larger_one_saves_more() -> None:
    points = operating_points(evaluation(), CHEAP, min_layers=0)
    fresh = evaluation(seed=1)
    assert [(point["epsilon"], point["perplexity_epsilon"]) for point in points] == list(product(EPSILONS, EPSILONS))
    points = of_both(points)
    for point in points:
        assert fresh.outcome(point["thresholds"]).change.changed < 1.15 * point["epsilon"]
        assert 0 < point["changed"] + point["changed_error"] <= point["epsilon"]
        assert (point["temperature"], point["documents"]) == (0.8, 5)
    saved = [point["saved"] for point in points]
    assert sorted(saved) == saved
    assert saved[0] > 0.01
    assert [point["layers"] for point in points] == sorted((p["layers"] for p in points), reverse=True)


def test_what_exits_save_is_less_routers_lenses_and_the_head() -> None:
    def saved(costs: Costs) -> float:
        return of_both(operating_points(evaluation(), costs, 0))[2]["saved"]

    assert saved(Costs(100.0, 800.0, 1.0, 0.0)) < 0.6 * saved(CHEAP)
    assert saved(Costs(100.0, 100.0, 1.0, 10.0)) < saved(CHEAP)
    dear = of_both(operating_points(evaluation(), Costs(100.0, 100.0, 50.0, 500.0), 0))
    assert [p["saved"] for p in dear] == [0.0] * 5
    assert [p["thresholds"] for p in dear] == [[1.0, 1.0, 1.0]] * 5


def test_too_little_text_shows_nothing() -> None:
    points = operating_points(evaluation(tokens=200), CHEAP, 0)
    assert points[0]["thresholds"] == [1.0, 1.0, 1.0]
    assert points[0]["tokens"] in range(60, 140)


@pytest.mark.parametrize("documents", [1, 2])
def test_thresholds_are_shown_on_other_tokens_than_they_are_chosen_on(documents: int) -> None:
    """Exits change no token of half of the documents, and all of the others': whichever half chooses, nothing may."""
    first = np.arange(2000) < 1000
    changed = np.repeat(~first[:, None], 3, axis=1).astype(np.float32)
    scores = np.full((2000, 3), 0.9, np.float32)
    of = np.zeros(2000, int) if documents == 1 else (~first).astype(int)
    points = operating_points(made_of(scores, changed, 0 * changed, of), CHEAP, 0)
    assert all(p["changed"] <= p["epsilon"] for p in points)
    assert all(p["thresholds"] == [1.0, 1.0, 1.0] for p in points)


def test_min_layers_is_kept_to() -> None:
    for point in operating_points(evaluation(), CHEAP, min_layers=4):
        assert point["thresholds"][0] == 1.0
    assert of_both(operating_points(evaluation(), CHEAP, min_layers=0))[4]["thresholds"][0] < 1.0


@pytest.mark.parametrize(("changed", "added"), [(0.001, 0.5), (0.5, 0.001), (0.5, 0.5)])
def test_a_choice_that_breaks_one_bound_is_refused_whatever_the_other(changed: float, added: float) -> None:
    shape = (4000, 3)
    scores = np.full(shape, 0.9, np.float32)
    documents = np.arange(4000) // 100
    made = made_of(scores, np.full(shape, changed, np.float32), np.full(shape, added, np.float32), documents)
    points = operating_points(made, CHEAP, 0)
    assert [point["thresholds"] for point in points] == [[1.0, 1.0, 1.0]] * 25
    kept = made_of(scores, np.full(shape, 0.001, np.float32), np.full(shape, 0.001, np.float32), documents)
    assert all(min(point["thresholds"]) < 1.0 for point in operating_points(kept, CHEAP, 0))


def test_perplexity_has_a_price_of_its_own() -> None:
    """Changed tokens that cost much log-loss leave fewer exits within the same bounds."""
    free, dear = (
        {(p["epsilon"], p["perplexity_epsilon"]): p for p in operating_points(evaluation(added=added), CHEAP, 0)}
        for added in (0.0, 3.0)
    )
    assert dear[0.05, 0.05]["saved"] < 0.8 * free[0.05, 0.05]["saved"]
    assert dear[0.05, 0.05]["perplexity"] <= 0.05
    assert dear[0.05, 0.01]["saved"] < dear[0.05, 0.05]["saved"]
    assert free[0.05, 0.01]["saved"] == free[0.05, 0.05]["saved"]
