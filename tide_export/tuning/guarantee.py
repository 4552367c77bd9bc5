"""Computes p-values for "the risk is above epsilon" and tests settings until the first failure.

Losses are one number in [0, 1] per prompt. The procedure is fixed-sequence testing of Learn then Test (Angelopoulos et
al., arXiv 2110.01052). A p-value is the inverse of the capital that betting against "the risk is above epsilon" wins
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", arXiv 2010.09686), or the exact
binomial one. NumPy alone.
"""

from collections.abc import Iterable
from math import ceil, exp, log, log1p

import numpy as np

BISECTIONS = 40  # of the interval of bets


def p_value(losses: np.ndarray, epsilon: float, bet: float | None) -> float:
    """Bounds the probability of losses as low as these if their true mean were above `epsilon`.

    Capital of 1 is multiplied by 1 + bet (epsilon - loss) for every prompt. If the mean of the expected losses is
    epsilon or more, the expected final capital is at most 1 (the mean of the logarithms is at most the logarithm of the
    mean), so it exceeds 1 / p with probability at most p (Markov). The expected loss may differ between prompts, and
    their order does not matter.

    Args:
        losses: float [n] in [0, 1], one per prompt; independent.
        epsilon: the risk to be ruled out, in (0, 1).
        bet: `best_bet` of other losses than these. None: every loss is 0 or 1 with the same expectation, so their sum
            is binomial. Decide before the losses are known: choosing the test that suits them breaks the guarantee.
    """
    if bet is None:
        return binomial_cdf(round(float(losses.sum())), len(losses), epsilon) if len(losses) else 1.0
    return min(1.0, exp(-_log_capital(losses, epsilon, bet)))


def best_bet(losses: np.ndarray, epsilon: float) -> float:
    """Returns the bet in [0, 1 / (1 - epsilon)] that would have won most on `losses`, float [n] in [0, 1].

    The largest if all losses are 0, and 0 if their mean is epsilon or more.
    """
    low, high = 0.0, 1 / (1 - epsilon)
    gains = epsilon - losses
    for _ in range(BISECTIONS):  # the slope of the logarithm of the capital falls with the bet
        bet = (low + high) / 2
        low, high = (bet, high) if float((gains / (1 + bet * gains)).sum()) > 0 else (low, bet)
    return high if low else 0.0


def _log_capital(losses: np.ndarray, epsilon: float, bet: float) -> float:
    factors = 1 + bet * (epsilon - losses)
    return float(np.log(factors).sum()) if float(factors.min(initial=1.0)) > 0 else -float("inf")


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Computes P(Bin(n, p) <= k), p in (0, 1), to about 1e-12 for n up to a million."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    i = np.arange(1, k + 1)
    choose = np.concatenate([[0.0], np.cumsum(np.log((n - i + 1) / i))])  # log of "n choose 0 .. k"
    terms = choose + np.arange(k + 1) * log(p) + (n - np.arange(k + 1)) * log1p(-p)
    top = terms.max()
    return min(1.0, exp(top) * float(np.exp(terms - top).sum()))


def prompts_needed(epsilon: float, delta: float, risk: float = 0.0) -> int:
    """Returns the fewest prompts with a mean loss of `risk` < `epsilon` whose p-value can reach `delta`.

    With `risk` 0 this is the smallest n with (1 - epsilon)**n <= delta: with fewer prompts no setting can pass. With
    more risk it is the number for the worst case, losses of 0 or 1, at the best bet.
    """
    return ceil(-log(delta) / _kl(risk, epsilon) - 1e-9)


def fixed_sequence_test(p_values: Iterable[float], delta: float) -> list[float]:
    """Returns the p-values of settings in order, up to and including the first that fails.

    The last setting before the failure may be used. Nothing after it counts, however small its p-value: so the chance
    of passing a setting whose true risk is above epsilon is at most `delta`, for any number of settings.

    Args:
        p_values: one per setting, in an order fixed beforehand; not read beyond the failure.
    """
    tested = []
    for value in p_values:
        tested.append(value)
        if value > delta:
            break
    return tested


def _kl(a: float, b: float) -> float:
    """Computes the KL divergence of Bernoulli(a) from Bernoulli(b), 0 <= a <= b < 1, b > 0."""
    first = a * log(a / b) if a > 0 else 0.0
    return first + (1 - a) * (log1p(-a) - log1p(-b))
