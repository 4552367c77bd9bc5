"""The statistics: p-values equal to exact values, fixed-sequence testing, and the guarantee itself, by simulation."""

import re
from fractions import Fraction
from itertools import product
from math import ceil, comb, e, erf, exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest

from tide_export.tuning.guarantee import binomial_cdf, fixed_sequence_test, hoeffding_bentkus, p_value, prompts_needed

DOCS = (Path(__file__).parents[2] / "docs" / "guide" / "guarantee.md").read_text()
TABLE = [
    [float(cell) for cell in line.strip("| ").split("|")] for line in DOCS.splitlines() if re.match(r"\| 0\.\d", line)
]

# --- p-values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (7, 0.01), (40, 0.3), (299, 0.01), (60, 0.95)])
def test_the_binomial_tail_is_the_exact_one(n, p):
    q = Fraction(p)
    exact = Fraction(0)
    for k in range(n + 1):
        exact += comb(n, k) * q**k * (1 - q) ** (n - k)
        assert binomial_cdf(k, n, p) == pytest.approx(float(exact), rel=1e-11)
    assert binomial_cdf(-1, n, p) == 0
    assert binomial_cdf(n + 1, n, p) == 1


def test_the_binomial_tail_holds_for_a_million():
    """Against the normal approximation with its skewness term, which is good to 1e-5 here."""
    n, p = 10**6, 0.02
    sigma = sqrt(n * p * (1 - p))
    for k in (19_600, 20_000, 20_300):
        z = (k + 0.5 - n * p) / sigma
        phi, density = 0.5 * (1 + erf(z / sqrt(2))), exp(-z * z / 2) / sqrt(2 * np.pi)
        assert binomial_cdf(k, n, p) == pytest.approx(phi - (1 - 2 * p) * (z * z - 1) / (6 * sigma) * density, abs=1e-5)


def test_the_binomial_p_value_is_the_chance_of_as_few_errors():
    """By summing over all 2**10 outcomes."""
    epsilon = 0.3
    for errors in range(11):
        chance = sum(
            epsilon ** sum(outcome) * (1 - epsilon) ** (10 - sum(outcome))
            for outcome in product((0, 1), repeat=10)
            if sum(outcome) <= errors
        )
        losses = np.array([1.0] * errors + [0.0] * (10 - errors))
        assert p_value(losses, epsilon, binary=True) == pytest.approx(chance, rel=1e-11)


def test_hoeffding_bentkus_is_the_smaller_of_the_two():
    n, epsilon = 100, 0.1
    total = 4.3
    hoeffding = exp(-n * (0.043 * log(0.043 / 0.1) + 0.957 * log(0.957 / 0.9)))
    bentkus = e * sum(comb(n, k) * 0.1**k * 0.9 ** (n - k) for k in range(ceil(total) + 1))
    assert hoeffding != pytest.approx(bentkus)
    assert hoeffding_bentkus(total, n, epsilon) == pytest.approx(min(hoeffding, bentkus))
    losses = np.full(n, total / n)
    assert p_value(losses, epsilon, binary=False) == pytest.approx(min(hoeffding, bentkus))


def test_losses_above_epsilon_are_no_evidence():
    for losses in (np.full(50, 0.2), np.full(50, 0.1), np.ones(3)):
        assert p_value(losses, 0.1, binary=False) == 1
    assert p_value(np.zeros(0), 0.1, binary=False) == 1


def test_no_error_at_all():
    for binary in (True, False):
        assert p_value(np.zeros(50), 0.05, binary) == pytest.approx(0.95**50)


def test_the_dust_of_floating_point_is_no_error():
    """Thirty times 0.1 adds up to more than 3."""
    losses = np.array([0.1] * 30 + [0.0] * 70)
    assert sum(losses.tolist()) > 3
    assert hoeffding_bentkus(3, 100, 0.05) == p_value(losses, 0.05, binary=False)


@pytest.mark.parametrize(("epsilon", "delta", "n"), [(0.05, 0.05, 59), (0.01, 0.05, 299), (0.02, 0.1, 114)])
def test_prompts_needed_without_an_error(epsilon, delta, n):
    for binary in (True, False):
        assert prompts_needed(epsilon, delta, binary=binary) == n
    assert (1 - epsilon) ** n <= delta < (1 - epsilon) ** (n - 1)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_numbers_of_prompts_in_the_docs(row):
    delta, epsilon, *numbers = row
    risks = (0.0, epsilon / 4, epsilon / 2)
    assert [prompts_needed(epsilon, delta, risk) for risk in risks] == [int(number) for number in numbers]


# --- the sequence ----------------------------------------------------------------------------------------------------


def losses_of(*risks: float, n: int = 100) -> list[np.ndarray]:
    return [np.full(n, risk) for risk in risks]


def test_the_sequence_stops_at_the_first_failure_and_reads_no_further():
    read = []

    def given():
        for number, losses in enumerate(losses_of(0.0, 0.01, 0.5, 0.0)):
            read.append(number)
            yield losses

    found = fixed_sequence_test(given(), 0.1, 0.05, binary=False)
    assert read == [0, 1, 2]
    assert [p <= 0.05 for p in found] == [True, True, False]


def test_all_may_pass_or_none():
    assert all(p <= 0.05 for p in fixed_sequence_test(losses_of(0, 0, 0.01), 0.1, 0.05, binary=False))
    assert [p <= 0.05 for p in fixed_sequence_test(losses_of(0.09, 0, 0), 0.1, 0.05, binary=False)] == [False]
    assert fixed_sequence_test([], 0.1, 0.05, binary=False) == []


# --- the guarantee, by simulation ------------------------------------------------------------------------------------

RUNS = 1500


def chosen(losses: list[np.ndarray], epsilon: float, delta: float, binary: bool) -> int | None:
    """Number of the setting that would be used."""
    passed = [p <= delta for p in fixed_sequence_test(losses, epsilon, delta, binary)]
    return sum(passed) - 1 if passed[0] else None


def draw(random: np.random.Generator, risk: float, n: int, positions: int) -> np.ndarray:
    """Losses of n independent prompts with mean exactly `risk`; prompts differ, positions of one hang together."""
    if positions == 1:
        return (random.random(n) < risk).astype(float)
    own = random.beta(2 * risk, 2 * (1 - risk), n)
    return random.binomial(positions, own) / positions


def share_of_bad_choices(risks, epsilon, delta, n, positions, rule=chosen) -> tuple[float, float]:
    """Over many runs: how often the chosen setting's true risk is above epsilon, and how often one is chosen."""
    random = np.random.default_rng(7)
    bad = any_chosen = 0
    for _ in range(RUNS):
        losses = [draw(random, risk, n, positions) for risk in risks]
        number = rule(losses, epsilon, delta, positions == 1)
        any_chosen += number is not None
        bad += number is not None and risks[number] > epsilon
    return bad / RUNS, any_chosen / RUNS


def allowed(delta: float) -> float:
    """Delta, and three standard deviations of a simulation of this length."""
    return delta + 3 * sqrt(delta * (1 - delta) / RUNS)


CASES = {
    "a path that crosses epsilon": [0.01, 0.03, 0.05, 0.08, 0.099, 0.1001, 0.12, 0.2],
    "all just above epsilon": [0.1001] * 12,
    "bad first, then good": [0.101, 0.1, 0.02, 0.01],
    "good, bad, good, bad": [0.02, 0.11, 0.03, 0.13, 0.001, 0.2],
}


@pytest.mark.parametrize("positions", [1, 8])
@pytest.mark.parametrize("risks", CASES.values(), ids=CASES.keys())
def test_a_bad_setting_is_chosen_no_more_often_than_delta(risks, positions):
    delta = 0.1
    bad, _ = share_of_bad_choices(risks, 0.1, delta, n=60, positions=positions)
    assert bad <= allowed(delta)


def test_the_bound_is_not_far_from_tight():
    """The worst case of the exact test comes near delta, so the simulation above can see a test that is too bold."""
    n, epsilon, delta = 60, 0.1, 0.1
    errors = max(k for k in range(n) if binomial_cdf(k, n, epsilon) <= delta)
    bad, _ = share_of_bad_choices([epsilon * 1.0001], epsilon, delta, n, positions=1)
    assert bad == pytest.approx(binomial_cdf(errors, n, epsilon), abs=3 * sqrt(delta / RUNS))
    assert bad > delta / 3


def test_good_settings_are_found():
    for positions in (1, 8):
        _, found = share_of_bad_choices([0.005, 0.01, 0.03], 0.1, 0.1, n=60, positions=positions)
        assert found > 0.95


def last_below_epsilon(losses, epsilon, delta, binary):
    """What one would do without a guarantee: the last setting whose measured risk is fine."""
    good = [number for number, one in enumerate(losses) if one.mean() <= epsilon]
    return good[-1] if good else None


def first_failing(losses, epsilon, delta, binary):
    """What a published program does."""
    return min(len(fixed_sequence_test(losses, epsilon, delta, binary)), len(losses)) - 1


def best_of_all(losses, epsilon, delta, binary):
    """Every setting tested at delta, no order kept."""
    good = [number for number, one in enumerate(losses) if p_value(one, epsilon, binary) <= delta]
    return good[-1] if good else None


@pytest.mark.parametrize("rule", [last_below_epsilon, first_failing, best_of_all])
def test_rules_without_a_guarantee_are_caught_by_this_simulation(rule):
    bad, _ = share_of_bad_choices(CASES["all just above epsilon"], 0.1, 0.1, n=60, positions=1, rule=rule)
    assert bad > 2 * allowed(0.1)
