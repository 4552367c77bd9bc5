"""Defines the networks at a checkpoint: a router and, optionally, a lens.

A lens maps the raw hidden state of its checkpoint towards the last layer's (tuned lens,
https://arxiv.org/abs/2303.08112); without one the hidden state is used unchanged, as in TIDE. A router reads the
normalized hidden state after the lens, as the head does, and computes a score in [0, 1]: Linear(D, R) -> SiLU ->
Linear(R, 1) -> sigmoid (TIDE 0.2.1, `router.py`).

The best predictor of whether a token is final is the head's confidence, which so small a network cannot compute. So
this package's routers also read a *shortlist*: the head's logits of the few hundred tokens that the model predicts
most. The two largest log-probabilities among them are added to the hidden layer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

SUMMARY_SIZE = 2  # log-probabilities in the summary of a shortlist


@dataclass(frozen=True)
class RouterArrays:
    """Holds a router's weights in float32, laid out for `x @ weight`.

    Attributes:
        down: [D, R].
        up: [R, 1].
        bias: added to the logit.
        shortlist: [D, N], or None.
        confidence: [2, R]; None without a shortlist.
    """

    down: np.ndarray
    up: np.ndarray
    bias: float
    shortlist: np.ndarray | None = None
    confidence: np.ndarray | None = None


@dataclass(frozen=True)
class LensArrays:
    """Holds a lens's float32 weights: down [D, r] and up [r, D], for `x @ weight`, and bias [D]."""

    down: np.ndarray
    up: np.ndarray
    bias: np.ndarray


class Router(nn.Module):
    """Maps normalized hidden states [..., D] to scores [...].

    Attributes:
        down: Linear(D, R, no bias).
        up: Linear(R, 1); TIDE's routers have no bias, so theirs is 0.
        shortlist: rows of the head [N, D], a buffer that is not trained; None in TIDE's form.
        confidence: Linear(2, R, no bias) on the summary of the shortlist; missing without a shortlist.
    """

    shortlist: torch.Tensor | None

    def __init__(self, hidden_size: int, bottleneck: int, shortlist: torch.Tensor | None = None):
        super().__init__()
        self.down = nn.Linear(hidden_size, bottleneck, bias=False)
        self.up = nn.Linear(bottleneck, 1)
        nn.init.zeros_(self.up.bias)
        self.register_buffer("shortlist", shortlist)
        if shortlist is not None:
            self.confidence = nn.Linear(SUMMARY_SIZE, bottleneck, bias=False)

    def logit(self, normalized: torch.Tensor) -> torch.Tensor:
        """Computes the score before the sigmoid, [...]."""
        return self.logit_with(normalized, None if self.shortlist is None else summarize(normalized, self.shortlist))

    def logit_with(self, normalized: torch.Tensor, summary: torch.Tensor | None) -> torch.Tensor:
        """Computes `logit` from a precomputed summary [..., 2]; None in TIDE's form."""
        hidden = self.down(normalized)
        if summary is not None:
            hidden = hidden + self.confidence(summary)
        return self.up(nn.functional.silu(hidden)).squeeze(-1)

    def forward(self, normalized: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.logit(normalized))

    def arrays(self) -> RouterArrays:
        down, up, bias = _array(self.down.weight.T), _array(self.up.weight.T), float(self.up.bias.detach())
        if self.shortlist is None:
            return RouterArrays(down, up, bias)
        return RouterArrays(down, up, bias, _array(self.shortlist.T), _array(self.confidence.weight.T))


class Lens(nn.Module):
    """Maps raw hidden states x [..., D] to x + up(down(x)) + bias, of low rank; starts as the identity."""

    def __init__(self, hidden_size: int, rank: int):
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return raw + self.up(self.down(raw))

    def arrays(self) -> LensArrays:
        return LensArrays(_array(self.down.weight.T), _array(self.up.weight.T), _array(self.up.bias))


def summarize(normalized: torch.Tensor, shortlist: torch.Tensor) -> torch.Tensor:
    """Computes the two largest log-probabilities [..., 2] among the tokens of a shortlist [N, D].

    Args:
        normalized: hidden states [..., D].
    """
    return (normalized @ shortlist.T).log_softmax(-1).topk(SUMMARY_SIZE, dim=-1).values


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())
