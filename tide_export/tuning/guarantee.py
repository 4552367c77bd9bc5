"""Computes p-values for "the risk is above epsilon" and tests settings in sequence until the first failure.

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
    """Computes how likely losses as low as these are, at most, if their true mean were above `epsilon`.

    Capital of 1 is multiplied by 1 + bet (epsilon - loss) for every prompt. If the mean of the expected losses is
    epsilon or more, it is expected to be 1 at most at the end (the mean of the logarithms is at most the logarithm of
    the mean), so it exceeds 1 / p with probability p at most (Markov). It need not be the same for every prompt, and
    the order of the prompts does not matter.

    Args:
        losses: float [n] in [0, 1], one per prompt; independent.
        epsilon: the risk to be ruled out, in (0, 1).
        bet: see `best_bet`, from other losses than these. None: every loss is 0 or 1, with the same expectation, so
            that their sum is binomial. To be decided before the losses are known: choosing the test that suits them
            would break the guarantee.
    """
    if bet is None:
        return binomial_cdf(round(float(losses.sum())), len(losses), epsilon) if len(losses) else 1.0
    return min(1.0, exp(-_log_capital(losses, epsilon, bet)))


def best_bet(losses: np.ndarray, epsilon: float) -> float:
    """Returns the bet in [0, 1 / (1 - epsilon)] that would have won most on `losses`, float [n] in [0, 1].

    It is the largest where no prompt lost anything, and 0 where the mean loss is epsilon or more.
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
    """P(Bin(n, p) <= k), p in (0, 1); accurate to about 1e-12 for n up to a million."""
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
    """Returns the fewest prompts whose p-value can be at most `delta` when their mean loss is `risk` (below `epsilon`).

    With `risk` 0 this is the smallest n with (1 - epsilon)**n <= delta: with fewer prompts no setting can pass. Above,
    it is that of the worst case, prompts of which each is right or wrong as a whole, with the best bet.
    """
    return ceil(-log(delta) / _kl(risk, epsilon) - 1e-9)


def fixed_sequence_test(p_values: Iterable[float], delta: float) -> list[float]:
    """Tests settings in the order they come, up to and including the first that fails; returns their p-values.

    The last setting before the failure may be used. Nothing after it counts, however small its p-value: that keeps the
    chance of passing any setting whose true risk is above epsilon at `delta` in all, for any number of settings.

    Args:
        p_values: of each setting, in an order fixed without looking at them; read no further than the failure.
    """
    tested = []
    for value in p_values:
        tested.append(value)
        if value > delta:
            break
    return tested


def _kl(a: float, b: float) -> float:
    """Kullback-Leibler divergence of Bernoulli(a) from Bernoulli(b), 0 <= a <= b < 1, b > 0."""
    first = a * log(a / b) if a > 0 else 0.0
    return first + (1 - a) * (log1p(-a) - log1p(-b))
