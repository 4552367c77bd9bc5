"""Changed tokens and the change of perplexity: what a mode changes of full depth's text.

*Changed tokens* is the share of positions at which a mode draws another token than full depth with the same noise, at
the temperature in use; greedy, at which another token is likeliest. The runtime draws the token of the largest
`logit / T + noise`, with Gumbel noise that depends on seed, position and token alone (`cpp/src/decoding/sampling.cpp`).
So both modes draw token i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i), of softmax probabilities p and
q, and the share is exactly 1 minus the sum of these over i: from the total variation d up to 2 d / (1 + d) (Daliri,
Musco and Suresh, "Coupling without communication", arXiv 2408.07978). Top-k, top-p and min-p are not considered.

*The change of perplexity* is that of full depth's own tokens, drawn at the same temperature: perplexity under the mode
over that under full depth, minus 1. NumPy alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TEMPERATURE = 0.8  # at which changed tokens are counted unless another is given
EPSILON = 0.02  # of changed tokens, and of the change of perplexity, that mode `auto` allows unless told otherwise
REST = 1e-4  # probability, at most, of tokens that are so unlikely in both modes that they count as one


@dataclass(frozen=True)
class Change:
    """Changed tokens and the change of perplexity at n positions, with standard errors over texts.

    Attributes:
        tokens: n.
        temperature: at which tokens are drawn; 0: greedy.
        changed, changed_error: share of changed tokens.
        perplexity, perplexity_error: the change of perplexity; 0.02 is 2 % more.
    """

    tokens: int
    temperature: float
    changed: float
    changed_error: float
    perplexity: float
    perplexity_error: float

    def within(self, epsilon: float, perplexity_epsilon: float) -> bool:
        """Returns whether both keep to their bounds with a standard error to spare (changed: >= 1 / n)."""
        error = max(self.changed_error, 1 / max(1, self.tokens))
        return self.changed + error <= epsilon and self.perplexity + self.perplexity_error <= perplexity_epsilon


def changed_tokens(full: np.ndarray, mode: np.ndarray, temperature: float) -> np.ndarray:
    """Computes the probability that the token of each position is changed, float64 [n]; to `REST`.

    Args:
        full, mode: float [n, V], logits of full depth and of the mode after the same tokens.
        temperature: 0 or more; at 0 the result is 0 or 1.
    """
    if temperature == 0:
        return (full.argmax(-1) != mode.argmax(-1)).astype(np.float64)
    pairs = zip(_softmax(full, temperature), _softmax(mode, temperature), strict=True)
    return np.array([1 - _both(p, q) for p, q in pairs]).clip(0, 1)


def added_loss(full: np.ndarray, mode: np.ndarray, temperature: float) -> np.ndarray:
    """Computes the expected log-loss that a mode adds to full depth's own tokens, nats, float64 [n].

    The loss is that of the models' own distributions (temperature 1); `temperature` says which tokens are drawn.

    Args:
        full, mode, temperature: as in `changed_tokens`.
    """
    added = _log_softmax(full) - _log_softmax(mode)
    if temperature == 0:
        return np.take_along_axis(added, full.argmax(-1)[:, None], -1)[:, 0].astype(np.float64)
    return np.einsum("nv,nv->n", _softmax(full, temperature), added, dtype=np.float64)


def change(changed: np.ndarray, added: np.ndarray, texts: Sequence[int] | np.ndarray, temperature: float) -> Change:
    """Averages `changed_tokens` and `added_loss`, float [n] each, over positions.

    Args:
        texts: the text of each position; errors are those of independent texts, or, of a single one, of positions.
    """
    share, error = _mean(changed, texts)
    nats, nats_error = _mean(added, texts)
    perplexity = float(np.expm1(nats))
    return Change(len(changed), temperature, share, error, perplexity, (1 + perplexity) * nats_error)


def _mean(values: np.ndarray, texts: Sequence[int] | np.ndarray) -> tuple[float, float]:
    """Returns the mean and its standard error over texts: of a ratio of sums, by the delta method."""
    mean = float(values.mean(dtype=np.float64))
    numbers = np.unique(np.asarray(texts), return_inverse=True)[1]
    if numbers.max(initial=0) == 0:
        numbers = np.arange(len(values))
    off = np.bincount(numbers, values - mean)
    return mean, float(np.sqrt((off**2).sum() * len(off) / max(1, len(off) - 1)) / len(values))


def _both(p: np.ndarray, q: np.ndarray) -> float:
    """Returns the probability that draws from p and q, float [V], with the same noise are equal.

    In ascending order of p / q, the sum over j of max(p_j / p_i, q_j / q_i) is that of p_j / p_i from i on and of
    q_j / q_i before i.
    """
    likely = np.maximum(p, q) > REST / len(p)
    p, q = (np.append(one, max(0.0, 1 - one.sum(dtype=np.float64))) for one in (p[likely], q[likely]))
    order = np.argsort(p / np.maximum(p + q, 1e-300))
    p, q = p[order], q[order]
    from_here = p[::-1].cumsum()[::-1]
    before = q.cumsum() - q
    possible = (p > 0) & (q > 0)
    return float((p * q / np.where(possible, from_here * q + before * p, 1.0))[possible].sum())


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    below = logits - logits.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))
