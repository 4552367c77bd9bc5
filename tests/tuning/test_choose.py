"""Candidates from the path, and the whole choice simulated: its true risk is above epsilon no more often than delta."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import tiers

from tide_export.tuning.choose import MAX_CANDIDATES, candidates, certify
from tide_export.tuning.measure import Measurement

LAYERS, DEPTH, POSITIONS = (3, 6, 9), 12, 6


def population(prompts: int, seed: int = 0) -> Measurement:
    """Prompts of very different difficulty, with routers that know something about it, and deeper ones more."""
    random = np.random.default_rng(seed)
    easy = random.normal(size=(prompts, 1, 1))  # of a whole prompt: its positions hang together
    sure = easy + random.normal(size=(prompts, POSITIONS, 3)) + np.array([0.5, 1.5, 2.5])
    scores = 1 / (1 + np.exp(-(sure + 0.7 * random.normal(size=sure.shape))))
    right = random.random(sure.shape) < 1 / (1 + np.exp(-2.5 * sure))
    full, added = np.full((prompts, POSITIONS), 5), 0.1 * ~right  # nats of a changed token
    return Measurement(scores.astype(np.float32), np.where(right, 5, 6), full, LAYERS, DEPTH, added)


def pick(whole: Measurement, numbers: np.ndarray) -> Measurement:
    parts = (values[numbers] for values in (whole.scores, whole.early, whole.full))
    return Measurement(*parts, LAYERS, DEPTH, whole.added[numbers])


def test_candidates_go_from_safe_to_aggressive_in_steps_below_epsilon():
    epsilon = 0.1
    path = candidates(population(300), epsilon)
    risks, layers = [point.loss for point in path], [point.layers for point in path]
    assert 10 < len(path) <= MAX_CANDIDATES
    assert risks[0] < 0.2 * epsilon
    assert epsilon < risks[-1] <= 1.5 * epsilon
    assert max(np.diff(risks)) < 0.15 * epsilon
    assert np.corrcoef(risks, layers)[0, 1] < -0.9
    assert all(point.layers < DEPTH for point in path)


def test_no_more_candidates_than_asked_for_and_both_ends_stay():
    whole = population(300)
    few, many = candidates(whole, 0.1, max_candidates=4), candidates(whole, 0.1)
    assert len(few) == 4
    assert (few[0], few[-1]) == (many[0], many[-1])


def test_routers_that_know_nothing_leave_no_candidate_that_is_safe():
    whole = population(300)
    wrong = replace(whole, early=np.full_like(whole.early, 6))
    found = candidates(wrong, 0.05)
    assert [point.loss > 0.05 for point in found] == [True]
    assert [tested.passed for tested in certify(wrong, wrong, found, 0.05, 0.1)] == [False]


def test_the_sequence_ends_at_the_first_failure():
    path, calibration = population(100, seed=1), population(200, seed=2)
    points = candidates(path, 0.1)
    tested = certify(path, calibration, points, 0.1, 0.1)
    assert 1 < len(tested) < len(points)
    assert [one.passed for one in tested] == [True] * (len(tested) - 1) + [False]
    assert [one.thresholds for one in tested] == [point.thresholds for point in points[: len(tested)]]
    for one in tested:
        assert one.risk == pytest.approx(calibration.losses(one.thresholds).mean())
        assert one.change.changed == pytest.approx(one.risk)
        assert one.change.perplexity == pytest.approx(np.expm1(0.1 * one.risk))
        assert one.layers == pytest.approx(calibration.outcome(one.thresholds)[1].mean())


def test_a_candidate_that_breaks_perplexity_fails_whatever_it_changes():
    path, calibration = population(100, seed=1), population(200, seed=2)
    points = candidates(path, 0.1)
    free = certify(path, calibration, points, 0.1, 0.1)
    bounded = certify(path, calibration, points, 0.1, 0.1, perplexity_epsilon=0.005)
    assert 1 < len(bounded) < len(free)
    assert [one.thresholds for one in bounded] == [one.thresholds for one in free[: len(bounded)]]
    assert [one.passed for one in bounded] == [True] * (len(bounded) - 1) + [False]
    last, failed = bounded[-2:]
    assert last.change.perplexity + last.change.perplexity_error <= 0.005
    assert failed.change.perplexity + failed.change.perplexity_error > 0.005
    assert free[len(bounded) - 1].passed, "for changed tokens alone"
    dear = replace(calibration, added=calibration.added + 1.0)  # every exit adds, also one that changes nothing
    assert [one.passed for one in certify(path, dear, points, 0.1, 0.1, perplexity_epsilon=0.02)] == [False]


def test_the_true_risk_is_above_epsilon_no_more_often_than_delta():
    """Paths and tests drawn anew from a population whose risks are known, many times."""
    epsilon, delta, runs = 0.1, 0.2, tiers.sized(25, 80)
    whole = population(4000)
    random = np.random.default_rng(5)
    bad = found = 0
    for _ in range(runs):
        path = pick(whole, random.integers(4000, size=40))
        points = candidates(path, epsilon, max_candidates=12)
        tested = certify(path, pick(whole, random.integers(4000, size=120)), points, epsilon, delta)
        passed = [one for one in tested if one.passed]
        if passed:
            found += 1
            bad += whole.losses(passed[-1].thresholds).mean() > epsilon
            assert passed[-1].layers < DEPTH
    assert bad / runs <= delta + 3 * sqrt(delta * (1 - delta) / runs)
    assert found > 0.9 * runs


def test_the_most_aggressive_candidate_of_such_a_path_is_bad_indeed():
    """Or the simulation above could not fail: what is merely hoped for on the path is above epsilon."""
    whole = population(4000)
    random = np.random.default_rng(5)
    for _ in range(10):
        points = candidates(pick(whole, random.integers(4000, size=40)), 0.1)
        assert whole.losses(points[-1].thresholds).mean() > 0.1
