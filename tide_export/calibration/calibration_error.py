"""Measures how far a router's score is from a probability, in bins of equally many tokens.

Expected calibration error: Guo et al., https://arxiv.org/abs/1706.04599. Needs only NumPy.
"""

from dataclasses import dataclass

import numpy as np

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Tokens in bins of ascending score.

    Attributes:
        score: mean score in each bin, float64 [bins].
        share: share of the bin's tokens that are labelled true, float64 [bins].
        count: tokens in each bin, int64 [bins].
    """

    score: np.ndarray
    share: np.ndarray
    count: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: mean over tokens of |score - share|, in [0, 1]."""
        return float(np.average(np.abs(self.score - self.share), weights=self.count))


def reliability(scores: np.ndarray, labels: np.ndarray, bins: int = BINS) -> Reliability:
    """Groups tokens into at most `bins` bins of equally many tokens; equal scores share a bin.

    Args:
        scores: float [n], in [0, 1].
        labels: bool [n].
        bins: at least 1.

    Raises:
        ValueError: there are no tokens, no bins, or lengths differ.
    """
    if len(scores) == 0 or len(scores) != len(labels) or bins < 1:
        raise ValueError(f"cannot put {len(scores)} scores with {len(labels)} labels into {bins} bins")
    order = np.argsort(scores, kind="stable")
    ranked, truth = scores[order].astype(np.float64), labels[order].astype(np.float64)
    wanted = np.ceil(np.arange(1, bins + 1) * len(ranked) / bins).astype(np.int64)
    ends = np.unique(np.searchsorted(ranked, ranked[wanted - 1], side="right"))
    starts = np.concatenate([[0], ends[:-1]])
    count = ends - starts
    return Reliability(np.add.reduceat(ranked, starts) / count, np.add.reduceat(truth, starts) / count, count)


def expected_calibration_error(scores: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Computes the expected calibration error; 0 if every score is the probability of its label."""
    return reliability(scores, labels, bins).error
