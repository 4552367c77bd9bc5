"""Whether tokens that were drawn have the distribution that is wanted of them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def probabilities(
    logits: Sequence[float] | np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """The textbook, in Python floats: sort, cut at k, softmax, drop what is less likely than a share of the likeliest,
    cut where the sum reaches p, normalise."""
    values = [float(value) for value in logits]
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if top_k:
        ranked = ranked[:top_k]
    weights = {token: math.exp((values[token] - values[ranked[0]]) / temperature) for token in ranked}
    weights = {token: weight for token, weight in weights.items() if weight >= min_p}
    total, added = math.fsum(weights.values()), 0.0
    kept: dict[int, float] = {}
    for token, weight in weights.items():
        kept[token] = weight
        added += weight / total
        if top_p < 1 and added >= top_p:
            break
    total = math.fsum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


def joint(
    logits_behind: Callable[[Sequence[int]], np.ndarray], options: Mapping[str, float], length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens, by the logits [V] behind the tokens before."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, share in known.items():
            for token, p in probabilities(logits_behind(tokens), **options).items():
                longer[(*tokens, token)] = share * p
        known = longer
    return known


def deviation(counts: Counter, expected: Mapping[tuple[int, ...], float], draws: int) -> float:
    """Standard deviations that the chi-square statistic lies above its mean, over outcomes expected five times or more
    and the others as one."""
    common = {key: draws * p for key, p in expected.items() if draws * p >= 5}
    rest = draws - sum(common.values())
    statistic = sum((counts[key] - wanted) ** 2 / wanted for key, wanted in common.items())
    if rest > 5:
        statistic += (draws - sum(counts[key] for key in common) - rest) ** 2 / rest
    return (statistic - len(common)) / math.sqrt(2 * len(common))
