"""Computes p-values for "the risk is above epsilon" and tests settings in sequence until the first failure.

Losses are one number in [0, 1] per prompt. The procedure is fixed-sequence testing of Learn then Test (Angelopoulos et
al., arXiv 2110.01052); the p-values are the exact binomial one and Hoeffding-Bentkus (Bates et al., "Distribution-free,
risk-controlling prediction sets", arXiv 2101.02703). NumPy alone.
"""

from collections.abc import Iterable
from math import ceil, e, exp, log, log1p

import numpy as np


def p_value(losses: np.ndarray, epsilon: float, binary: bool) -> float:
    """How likely losses as low as these are, at most, if their true mean were above `epsilon`.

    Args:
        losses: float [n] in [0, 1], one per prompt.
        epsilon: the risk to be ruled out, in (0, 1).
        binary: every loss is 0 or 1, so that their sum is binomial. To be decided before the losses are known: choosing
            the test that suits them would break the guarantee.
    """
    n = len(losses)
    if n == 0:
        return 1.0
    total = _exact_sum(losses)
    if binary:
        return binomial_cdf(ceil(total), n, epsilon)
    return hoeffding_bentkus(total, n, epsilon)


def hoeffding_bentkus(total: float, n: int, epsilon: float) -> float:
    """p-value of n losses in [0, 1] that add up to `total`: min(exp(-n kl(R, eps)), e P(Bin(n, eps) <= ceil(n R)))."""
    risk = min(total / n, epsilon)
    return min(1.0, exp(-n * _kl(risk, epsilon)), e * binomial_cdf(ceil(total), n, epsilon))


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


def prompts_needed(epsilon: float, delta: float, risk: float = 0.0, binary: bool = False) -> int:
    """The fewest prompts whose p-value is at most `delta` when their mean loss is `risk` (below `epsilon`).

    With `risk` 0 this is the smallest n with (1 - epsilon)**n <= delta: with fewer prompts no setting can pass.
    """
    n = 1
    while (binomial_cdf(ceil(n * risk), n, epsilon) if binary else hoeffding_bentkus(n * risk, n, epsilon)) > delta:
        n += 1
    return n


def fixed_sequence_test(losses: Iterable[np.ndarray], epsilon: float, delta: float, binary: bool) -> list[float]:
    """Tests settings in the order they come, up to and including the first that fails; returns their p-values.

    The last setting before the failure may be used. Nothing after it counts, however small its losses: that keeps the
    chance of passing any setting whose true risk is above `epsilon` at `delta` in all, for any number of settings.

    Args:
        losses: of each setting, in an order fixed without looking at them; read no further than the failure.
        binary: see `p_value`.
    """
    p_values = []
    for sample in losses:
        p_values.append(p_value(sample, epsilon, binary))
        if p_values[-1] > delta:
            break
    return p_values


def _kl(a: float, b: float) -> float:
    """Kullback-Leibler divergence of Bernoulli(a) from Bernoulli(b), 0 <= a <= b < 1, b > 0."""
    first = a * log(a / b) if a > 0 else 0.0
    return first + (1 - a) * (log1p(-a) - log1p(-b))


def _exact_sum(losses: np.ndarray) -> float:
    """Their sum without float rounding errors, which `ceil` would turn into a whole loss more."""
    return round(float(np.sum(losses, dtype=np.float64)), 9)
