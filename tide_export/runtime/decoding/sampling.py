"""Selects the next token from logits: greedy, or drawn after temperature, top-k and top-p, in that order.

Every sequence has its own `Sampler`. The same seed and the same logits give the same tokens.
"""

from math import isfinite
from typing import Any

import numpy as np

from tide_export.errors import GenerationError


class Sampler:
    """Picks token ids by the options of one generation."""

    def __init__(self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int | None = None) -> None:
        """Takes options as `GenerationConfig` checked them."""
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray) -> int:
        """The next token for float logits [V]. Equal logits: greedy and top-k prefer the lowest id. Raises
        GenerationError: the logits are not finite, so the model is broken."""
        if self.greedy:
            best = int(logits.argmax())  # numpy and torch both return the first of equals
            if not isfinite(logits[best]):  # NaN counts as the largest
                raise GenerationError("the model's logits are not finite")
            return best
        return self.draw(*self.distribution(logits))

    def save(self) -> Any:
        """The state of the random numbers, which `restore` returns to."""
        return None if self.greedy else self._random.bit_generator.state

    def restore(self, saved: Any) -> None:
        if saved is not None:
            self._random.bit_generator.state = saved

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; nothing is drawn."""
        return self.temperature == 0

    def draw(self, ids: np.ndarray, weights: np.ndarray) -> int:
        """One of `ids` [n], with probabilities in proportion to `weights` [n]."""
        edges = weights.cumsum()
        drawn = np.searchsorted(edges, self.uniform() * edges[-1], side="right")
        return int(ids[min(drawn, len(ids) - 1)])

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return self._random.random()

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that can be drawn (int64 [n]) and their probabilities (float64 [n], adding up to 1). Raises
        GenerationError: the logits are not finite."""
        best = logits.max()  # NaN if any is
        if not isfinite(best):
            raise GenerationError("the model's logits are not finite")
        ids = _top_ids(logits, self.top_k) if 0 < self.top_k < len(logits) else np.arange(len(logits))
        probabilities = _softmax(logits[ids], best, self.temperature)
        if self.top_p < 1:
            order = np.argsort(-probabilities, kind="stable")
            top = order[: np.searchsorted(probabilities[order].cumsum(), self.top_p) + 1]
            ids, probabilities = ids[top], probabilities[top] / probabilities[top].sum()
        return ids, probabilities


def _top_ids(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of exactly k largest logits, ascending; of equal logits at the edge, the lowest ids."""
    edge = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = np.flatnonzero(logits > edge)
    ties = np.flatnonzero(logits == edge)[: k - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _softmax(logits: np.ndarray, best: float, temperature: float) -> np.ndarray:
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, whose exp is the 0 it should be
        weights = np.exp((logits.astype(np.float64) - best) / temperature)
    return weights / weights.sum()
