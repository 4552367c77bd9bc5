"""The statistics: p-values equal to exact values, fixed-sequence testing, and the guarantee itself, by simulation."""

import re
from fractions import Fraction
from itertools import product
from math import ceil, comb, e, erf, exp, log, log1p, sqrt
from pathlib import Path

import numpy as np
import pytest
import tiers

from tide_export.tuning.guarantee import best_bet, binomial_cdf, fixed_sequence_test, p_value, prompts_needed

DOCS = (Path(__file__).parents[2] / "docs" / "guide" / "bound-on-change.md").read_text()
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
        assert p_value(losses, epsilon, bet=None) == pytest.approx(chance, rel=1e-11)


def test_the_betting_p_value_is_the_inverse_of_the_capital():
    losses = np.array([0.0, 0.25, 0.0, 0.05])
    capital = (1 + 2 * 0.1) ** 2 * (1 - 2 * 0.15) * (1 + 2 * 0.05)
    assert p_value(losses, 0.1, bet=2) == p_value(losses[::-1], 0.1, bet=2) == pytest.approx(min(1, 1 / capital))
    assert p_value(np.tile(losses, 9), 0.1, bet=1) == pytest.approx((1.1**2 * 0.85 * 1.05) ** -9)


def test_a_bet_that_lost_everything_is_no_evidence():
    assert p_value(np.array([0.0] * 500 + [1.0]), 0.1, bet=1 / 0.9) == 1
    for bet in (0.0, None):
        assert p_value(np.zeros(0), 0.1, bet) == 1


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.5])
def test_the_best_bet_wins_most(epsilon):
    random = np.random.default_rng(3)
    for mean in (epsilon / 8, epsilon / 2):
        losses = random.choice([0.0, 1.0, 0.3], size=400, p=[1 - 2 * mean, mean / 2, 1.5 * mean])
        bet = best_bet(losses, epsilon)
        assert 0 < bet < 1 / (1 - epsilon)
        others = [p_value(losses, epsilon, other) for other in np.linspace(0, 1 / (1 - epsilon), 50)]
        assert p_value(losses, epsilon, bet) <= min(others) * (1 + 1e-9)
    assert best_bet(np.zeros(20), epsilon) == pytest.approx(1 / (1 - epsilon))
    assert best_bet(np.full(20, epsilon), epsilon) == best_bet(np.ones(3), epsilon) == 0


def test_no_error_at_all():
    for bet in (None, best_bet(np.zeros(9), 0.05)):
        assert p_value(np.zeros(50), 0.05, bet) == pytest.approx(0.95**50)


def hoeffding_bentkus(losses: np.ndarray, epsilon: float) -> float:
    """The p-value that `tune` had before (Bates et al., arXiv 2101.02703): of the sum of the losses alone."""
    n, total = len(losses), round(float(losses.sum()), 9)
    risk = min(total / n, epsilon)
    divergence = (risk * log(risk / epsilon) if risk else 0) + (1 - risk) * (log1p(-risk) - log1p(-epsilon))
    return min(1.0, exp(-n * divergence), e * binomial_cdf(ceil(total), n, epsilon))


@pytest.mark.parametrize("epsilon", [0.02, 0.05])
@pytest.mark.parametrize(("n", "least"), [(120, 0.9), (400, 0.99)])
def test_betting_proves_more_than_the_sum_of_the_losses(epsilon, n, least):
    """Prompts of 32 positions that differ in difficulty, with a bet from half as many others."""
    random = np.random.default_rng(11)
    before, now = [], []
    for _ in range(100):
        path, losses = (draw(random, epsilon / 3, size, 32, concentration=20) for size in (n // 2, n))
        before.append(hoeffding_bentkus(losses, epsilon))
        now.append(p_value(losses, epsilon, best_bet(path, epsilon)))
    assert np.mean(np.array(now) < before) >= least
    assert np.median(now) < np.median(before) / 2


def test_no_sample_of_one_mean_proves_less_by_betting_than_by_hoeffding():
    """With the bet for that mean: the logarithm is concave, and its chord is Hoeffding's bound."""
    epsilon, risk = 0.1, 0.04
    bet = (epsilon - risk) / (epsilon * (1 - epsilon))
    hoeffding = exp(-50 * (risk * log(risk / epsilon) + (1 - risk) * log((1 - risk) / (1 - epsilon))))
    random = np.random.default_rng(2)
    for losses in ([1.0] * 2 + [0.0] * 48, [0.04] * 50, [0.5] * 4 + [0.0] * 46, random.dirichlet(np.ones(50)) * 2):
        assert np.mean(losses) == pytest.approx(risk)
        assert p_value(np.array(losses), epsilon, bet) <= hoeffding * (1 + 1e-9)


@pytest.mark.parametrize(("epsilon", "delta", "n"), [(0.05, 0.05, 59), (0.01, 0.05, 299), (0.02, 0.1, 114)])
def test_prompts_needed_without_an_error(epsilon, delta, n):
    assert prompts_needed(epsilon, delta) == n
    assert (1 - epsilon) ** n <= delta < (1 - epsilon) ** (n - 1)
    bet = best_bet(np.zeros(1), epsilon)
    assert p_value(np.zeros(n), epsilon, bet) <= delta < p_value(np.zeros(n - 1), epsilon, bet)


def test_prompts_needed_in_the_worst_case():
    """Each prompt right or wrong as a whole."""
    n = prompts_needed(0.1, 0.05, 0.05)
    losses = np.array([1.0] * round(n / 20) + [0.0] * (n - round(n / 20)))
    assert p_value(losses, 0.1, best_bet(losses, 0.1)) == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_numbers_of_prompts_in_the_docs(row):
    delta, epsilon, *numbers = row
    risks = (0.0, epsilon / 4, epsilon / 2)
    assert [prompts_needed(epsilon, delta, risk) for risk in risks] == [int(number) for number in numbers]


# --- the sequence ----------------------------------------------------------------------------------------------------


def test_the_sequence_stops_at_the_first_failure_and_reads_no_further():
    read = []

    def given():
        for value in (0.0, 0.05, 0.5, 0.0):
            read.append(value)
            yield value

    assert fixed_sequence_test(given(), 0.05) == read == [0.0, 0.05, 0.5]


def test_all_may_pass_or_none():
    assert fixed_sequence_test([0.01, 0.0, 0.02], 0.05) == [0.01, 0.0, 0.02]
    assert fixed_sequence_test([0.09, 0.0, 0.0], 0.05) == [0.09]
    assert fixed_sequence_test([], 0.05) == []


# --- the guarantee, by simulation ------------------------------------------------------------------------------------

RUNS = tiers.sized(400, 1500)


def chosen(p_values: list[float], losses: list[np.ndarray], epsilon: float, delta: float) -> int | None:
    """Number of the setting that would be used."""
    passed = [p <= delta for p in fixed_sequence_test(p_values, delta)]
    return sum(passed) - 1 if passed[0] else None


def draw(random: np.random.Generator, risk: float, n: int, positions: int, concentration: float = 2) -> np.ndarray:
    """Losses of n independent prompts with mean exactly `risk`; prompts differ, positions of one hang together."""
    if positions == 1:
        return (random.random(n) < risk).astype(float)
    own = random.beta(concentration * risk, concentration * (1 - risk), n)
    return random.binomial(positions, own) / positions


def share_of_bad_choices(risks, epsilon, delta, n, positions, rule=chosen) -> tuple[float, float]:
    """Over many runs: how often the chosen setting's true risk is above epsilon, and how often one is chosen."""
    random = np.random.default_rng(7)
    bad = any_chosen = 0
    bets = [
        None if positions == 1 else best_bet(draw(random, risk / 2, n, positions), epsilon)  # from losses too low
        for risk in risks
    ]
    for _ in range(RUNS):
        losses = [draw(random, risk, n, positions) for risk in risks]
        p_values = [p_value(sample, epsilon, bet) for sample, bet in zip(losses, bets, strict=True)]
        number = rule(p_values, losses, epsilon, delta)
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


def last_below_epsilon(p_values, losses, epsilon, delta):
    """What one would do without a guarantee: the last setting whose measured risk is fine."""
    good = [number for number, one in enumerate(losses) if one.mean() <= epsilon]
    return good[-1] if good else None


def first_failing(p_values, losses, epsilon, delta):
    """What a published program does."""
    return min(len(fixed_sequence_test(p_values, delta)), len(losses)) - 1


def best_of_all(p_values, losses, epsilon, delta):
    """Every setting tested at delta, no order kept."""
    good = [number for number, p in enumerate(p_values) if p <= delta]
    return good[-1] if good else None


@pytest.mark.parametrize("rule", [last_below_epsilon, first_failing, best_of_all])
def test_rules_without_a_guarantee_are_caught_by_this_simulation(rule):
    bad, _ = share_of_bad_choices(CASES["all just above epsilon"], 0.1, 0.1, n=60, positions=1, rule=rule)
    assert bad > 2 * allowed(0.1)


@pytest.mark.parametrize("bet", [0.2, 1.0, 1 / 0.9])
def test_prompts_may_differ_in_their_risks(bet):
    """Places of the same few documents, as with several prompts from each: their mean risk alone is epsilon."""
    epsilon, delta = 0.1, 0.1
    random = np.random.default_rng(13)
    expected = np.repeat([0.0, 0.02, 0.06, 0.32], 15)
    assert expected.mean() >= epsilon
    losses = random.binomial(8, expected, size=(4 * RUNS, 60)) / 8
    passed = np.mean([p_value(one, epsilon, bet) <= delta for one in losses])
    assert passed <= delta
