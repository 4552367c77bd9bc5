"""Whether tokens that were drawn have the distribution that is wanted of them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tide_export.runtime.decoding.sampling import Sampler


def probabilities(sampler: Sampler, logits: np.ndarray) -> dict[int, float]:
    """Of the tokens that can be drawn."""
    ids, weights = sampler.distribution(logits)
    assert weights.dtype == np.float32
    return dict(zip(ids.tolist(), (weights / weights.sum(dtype=np.float64)).tolist(), strict=True))


def joint(
    logits_behind: Callable[[Sequence[int]], np.ndarray], sampler: Sampler, length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens, by the logits [V] behind the tokens before."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, share in known.items():
            for token, p in probabilities(sampler, logits_behind(tokens)).items():
                longer[(*tokens, token)] = share * p
        known = longer
    return known


def deviation(counts: Counter, expected: dict[tuple[int, ...], float], draws: int) -> float:
    """Standard deviations that the chi-square statistic lies above its mean, over outcomes expected five times or more
    and the others as one."""
    common = {key: draws * p for key, p in expected.items() if draws * p >= 5}
    rest = draws - sum(common.values())
    statistic = sum((counts[key] - wanted) ** 2 / wanted for key, wanted in common.items())
    if rest > 5:
        statistic += (draws - sum(counts[key] for key in common) - rest) ** 2 / rest
    return (statistic - len(common)) / math.sqrt(2 * len(common))
