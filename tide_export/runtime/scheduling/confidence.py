"""Bounds the mean of losses that come one after the other, at every time at once.

An empirical-Bernstein confidence sequence (Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", arXiv 1810.08240, theorem 4). Let m be the expected loss given all before, b a bet
in (0, 1), psi(b) = -log(1 - b) - b, and V the sum of the squared differences of every loss to the mean of those before
it. Then exp(b (sum of losses - sum of m) - psi(b) V) is a supermartingale, so the probability that it ever exceeds
1 / delta is at most delta; the same holds with losses and m exchanged. Expected losses may change from one to the next,
as those of live traffic do. That is why `tuning.guarantee` does not serve here: its capital is for a number of losses
that is fixed before.
"""

import numpy as np

_BETS = 0.95 * 0.5 ** np.arange(12)  # the smaller ones suit more losses
_RANKS = np.arange(1, len(_BETS) + 1)
_WEIGHTS = 1 / (_RANKS * (_RANKS + 1))  # of delta: they add up to less than 1
_PSI = -np.log1p(-_BETS) - _BETS


class ConfidenceSequence:
    """Bounds of the mean of the expected losses so far.

    Attributes:
        count: losses so far.
    """

    def __init__(self, delta: float) -> None:
        """Each bound is wrong at some time with probability `delta` at most."""
        self._limits = -np.log(delta * _WEIGHTS)
        self.count, self._sum, self._variation = 0, 0.0, 0.0

    def add(self, loss: float) -> None:
        """Adds a loss in [0, 1]."""
        self._variation += (loss - self._sum / max(self.count, 1)) ** 2
        self._sum += loss
        self.count += 1

    @property
    def upper(self) -> float:
        """The mean of the expected losses is no larger."""
        return min(1.0, (self._sum + self._deviation) / self.count) if self.count else 1.0

    @property
    def lower(self) -> float:
        """The mean of the expected losses is no smaller."""
        return max(0.0, (self._sum - self._deviation) / self.count) if self.count else 0.0

    @property
    def _deviation(self) -> float:
        return float(((self._limits + _PSI * self._variation) / _BETS).min())
