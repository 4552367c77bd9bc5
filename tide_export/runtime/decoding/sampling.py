"""Selects the next token from logits: greedy, or drawn.

First `LogitsProcessing` changes the logits, where an option asks for it. Then the most likely token is taken, or one is
drawn after temperature, min-p, top-k and top-p, in this order, which is that of vLLM V1: min-p keeps the tokens whose
probability is at least `min_p` times the largest, and top-p counts the probabilities of what min-p and top-k keep.

Every sequence has its own `Sampler`. The same seed and the same logits give the same tokens.
"""

from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from tide_export.errors import ConstraintError, GenerationError
from tide_export.runtime.decoding.processing import LogitsProcessing
from tide_export.runtime.sequence import Candidates

BLOCK = 256  # weights that are added up before one of them is drawn
GROUP = 64  # logits of which the largest is looked at before the others
TINY, HUGE = 1e-30, 1e30  # temperatures beyond which nothing changes any more


class TokenLogprobs(NamedTuple):
    """Log-probabilities by the model's logits, before anything changes them."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...]  # the most likely tokens and theirs, best first; of equal ones the lowest id


class Sampler:
    """Picks token ids by the options of one generation."""

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        *,
        min_p: float = 0.0,
        processing: LogitsProcessing | None = None,
        logprobs: int | None = None,
    ) -> None:
        """Takes options as `GenerationConfig` checked them.

        Args:
            processing: changes the logits; None: nothing does.
        """
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.logprobs: list[TokenLogprobs] | None = None if logprobs is None else []
        self._top_logprobs, self._processing = logprobs or 0, processing
        self._random = np.random.default_rng(seed)
        self._length = len(processing.ids) if processing else 0  # tokens of the sequence without drafts

    @property
    def candidates(self) -> int:
        """How many of the largest logits it chooses from; 0: it needs all of them."""
        if self._processing is not None or self.logprobs is not None:
            return 0
        return 1 if self.greedy else self.top_k

    def __call__(self, logits: np.ndarray | Candidates) -> int:
        """The next token for float logits [V], or for as many `candidates`; it is then part of the sequence. Equal
        logits: greedy and top-k prefer the lowest id. Raises GenerationError: the logits are not finite, so the model
        is broken."""
        if isinstance(logits, Candidates):
            return int(logits.tokens[self._choose(logits.logits)])
        if self._processing is None:
            token = self._choose(logits)
        else:
            self._processing.rewind(self._length)
            token = self._choose(self._processed(logits))
            self._processing.accept(token)
            self._length += 1
        if self.logprobs is not None:
            self.logprobs.append(_logprobs(logits, token, self._top_logprobs))
        return token

    def draft(self, logits: np.ndarray | Candidates) -> int:
        """The most likely token of an early exit's logits [V], after the same processing. It is part of the sequence
        for further drafts, until the next token is chosen."""
        if isinstance(logits, Candidates):
            return int(logits.tokens[_most_likely(logits.logits)])
        if self._processing is None:
            return _most_likely(logits)
        token = _most_likely(self._processed(logits))
        self._processing.accept(token)
        return token

    def take_draft(self, token: int) -> bool:
        """Adds a draft as `draft` does, unless the grammar forbids it; whether it did."""
        if self._processing is not None:
            if not self._processing.allows(token):
                return False
            self._processing.accept(token)
        return True

    def save(self) -> Any:
        """The state that `restore` returns to."""
        random = None if self.greedy else self._random.bit_generator.state
        return random, self._length, len(self.logprobs or ())

    def restore(self, saved: Any) -> None:
        """Also where an exception ended any call since."""
        random, self._length, logprobs = saved
        if random is not None:
            self._random.bit_generator.state = random
        if self._processing is not None:
            self._processing.restore(self._length)
        if self.logprobs is not None:
            del self.logprobs[logprobs:]

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; nothing is drawn."""
        return self.temperature == 0

    def draw(self, ids: np.ndarray, weights: np.ndarray) -> int:
        """One of `ids` [n], with probabilities in proportion to `weights` [n]."""
        number = self.uniform()
        if len(weights) < 4 * BLOCK:
            return int(ids[_share_at(weights, number)[0]])
        whole = len(weights) // BLOCK * BLOCK
        sums = np.append(weights[:whole].reshape(-1, BLOCK).sum(1), weights[whole:].sum())
        block, number = _share_at(sums, number)
        start = block * BLOCK
        return int(ids[start + _share_at(weights[start : start + BLOCK], number)[0]])

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return self._random.random()

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that can be drawn (int64 [n]), and numbers in proportion to their probabilities (float32 [n]).
        Raises GenerationError: the logits are not finite."""
        best = logits.max()  # NaN if any is
        if not isfinite(best):
            raise GenerationError("the model's logits are not finite")
        if 0 < self.top_k < len(logits):
            ids = _top_ids(logits, self.top_k)
            weights = _weights(logits[ids], best, self.temperature)
        else:
            ids, weights = _all_ids(len(logits)), _weights(logits, best, self.temperature)
        if self.min_p > 0:
            likely = np.flatnonzero(weights >= self.min_p)  # the largest is 1
            ids, weights = ids[likely], weights[likely]
        if self.top_p < 1:
            top = _nucleus(weights, self.top_p)
            ids, weights = ids[top], weights[top]
        return ids, weights

    def _choose(self, logits: np.ndarray) -> int:
        return _most_likely(logits) if self.greedy else self.draw(*self.distribution(logits))

    def _processed(self, logits: np.ndarray) -> np.ndarray:
        assert self._processing is not None
        if not isfinite(logits.max()):
            raise GenerationError("the model's logits are not finite")
        changed = self._processing(logits)
        if not isfinite(changed.max()):
            raise ConstraintError("logits_processor, logit_bias and grammar leave no token with a finite logit")
        return changed


def _most_likely(logits: np.ndarray) -> int:
    best = int(logits.argmax())  # numpy and torch both return the first of equals
    if not isfinite(logits[best]):  # NaN counts as the largest
        raise GenerationError("the model's logits are not finite")
    return best


def _logprobs(logits: np.ndarray, token: int, k: int) -> TokenLogprobs:
    """Of `token` and of the k most likely."""
    best = float(logits.max())
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    top = _top_ids(logits, k) if 0 < k < len(logits) else np.arange(len(logits) if k else 0)
    top = top[np.argsort(-logits[top], kind="stable")]
    return TokenLogprobs(float(logits[token]) - total, tuple((int(one), float(logits[one]) - total) for one in top))


def _top_ids(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of exactly k largest logits, ascending; of equal logits at the edge, the lowest ids."""
    groups = len(logits) // GROUP
    if groups > 4 * k:  # k groups have a logit of the k-th largest maximum or more: so do the k largest logits
        maxima = logits[: groups * GROUP].reshape(GROUP, groups).max(0)
        candidates = np.flatnonzero(logits >= np.partition(maxima, groups - k)[groups - k])
    else:
        candidates = _all_ids(len(logits))
    values = logits[candidates]
    edge = np.partition(values, len(values) - k)[len(values) - k]
    above = candidates[values > edge]
    ties = candidates[values == edge][: k - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the fewest largest weights that sum to a share `top_p` or more, largest first."""
    total = weights.sum(dtype=np.float64)
    # All that are less than this add up to half of what may be omitted, at most.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / (2 * len(weights)))
    largest = candidates[np.argsort(-weights[candidates], kind="stable")]
    return largest[: np.searchsorted(weights[largest].cumsum(dtype=np.float64), top_p * total) + 1]


def _weights(logits: np.ndarray, best: float, temperature: float) -> np.ndarray:
    """Numbers float32 in proportion to the probabilities; that of the most likely token is 1."""
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, whose exp is the 0 it should be
        return np.exp((logits - np.float32(best)) / np.float32(min(max(temperature, TINY), HUGE)))


def _share_at(weights: np.ndarray, number: float) -> tuple[int, float]:
    """Divides [0, 1) among the weights: in which one's share `number` lies, never one of 0, and where in that share."""
    edges = weights.cumsum(dtype=np.float64)
    wanted = number * edges[-1]
    index = int(edges.searchsorted(wanted, side="right"))
    if index == len(weights):  # the product was rounded up
        index = int(np.flatnonzero(weights)[-1])
    before = edges[index - 1] if index else 0.0
    return index, min((wanted - before) / (edges[index] - before), 1.0)


@lru_cache(maxsize=4)
def _all_ids(count: int) -> np.ndarray:
    return np.arange(count)
