"""The loss of lenses: KL divergence of an exit from the full model over a part of the vocabulary.

The head is the most expensive part of training a lens. So the loss of a batch takes the tokens that are likely in the
full model there, and a random sample of all others, with logits shifted to represent them.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import torch

from tide_export.calibration.labels import head_matrix
from tide_export.model.source import SourceModel

WHOLE_VOCABULARY = 8192  # up to this size the loss takes every token
SAMPLED_TOKENS = 2048  # minimum
SIZE_STEP = 1024  # the part's size is a multiple of it: with a new size in every batch the heap fragments and grows
PRODUCTS = 6  # timed matmuls, of which the fastest counts
CLEARLY_FASTER = 0.8  # share of the time in float32
MARGIN = 4.0  # nats below a position's largest logit, above which tokens are likely

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """The full model's distribution for n tokens, over K tokens of the vocabulary.

    Attributes:
        logits: computes the logits [n, K] of normalized hidden states [n, D'].
        shift: added to the logits, [K]: 0, or for sampled tokens the logarithm of how many each represents.
        probabilities: [n, K].
    """

    logits: Logits
    shift: torch.Tensor
    probabilities: torch.Tensor

    def loss(self, normalized: torch.Tensor) -> torch.Tensor:
        """Computes the mean loss for the exits' normalized hidden states [n, D'], up to a constant."""
        log_exit = (self.logits(normalized).float() + self.shift).log_softmax(-1)
        return torch.nn.functional.kl_div(log_exit, self.probabilities, reduction="batchmean")


class PartialHead:
    """Computes the targets of batches, in bfloat16 if the device is faster in it."""

    def __init__(self, source: SourceModel):
        self.source = source
        self.dtype = fast_dtype(source.device)
        rows = head_matrix(source)
        self._rows = None if rows is None else rows.to(source.device, self.dtype or torch.float32)

    def autocast(self) -> AbstractContextManager:
        """Returns the context in which matmuls run in `dtype`."""
        return torch.autocast(
            self.source.device.type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None
        )

    def target(self, full: torch.Tensor, generator: torch.Generator) -> Target:
        """Computes the full model's distribution for its normalized hidden states [n, D'].

        Args:
            generator: draws the sampled tokens, on the CPU.
        """
        with torch.no_grad():
            logits = self._logits(None)(full)
            vocabulary = logits.shape[-1]
            if vocabulary <= WHOLE_VOCABULARY:
                return self._target(None, logits, torch.zeros(vocabulary, device=logits.device))
            considered = (logits > logits.amax(-1, keepdim=True) - MARGIN).any(0)
            others = (~considered).nonzero()[:, 0]
            chosen = considered.nonzero()[:, 0]
            shift = torch.zeros(len(chosen), device=logits.device)
            if len(others):
                count = -(-(len(chosen) + SAMPLED_TOKENS) // SIZE_STEP) * SIZE_STEP - len(chosen)
                drawn = torch.randint(len(others), (count,), generator=generator).to(others.device)
                chosen = torch.cat([chosen, others[drawn]])
                shift = torch.cat([shift, shift.new_full((count,), len(others) / count).log()])
            return self._target(chosen, logits[:, chosen], shift)

    def _target(self, tokens: torch.Tensor | None, logits: torch.Tensor, shift: torch.Tensor) -> Target:
        return Target(self._logits(tokens), shift, (logits.float() + shift).softmax(-1))

    def _logits(self, tokens: torch.Tensor | None) -> Logits:
        """Returns the head for `tokens`, int64 [K], or for the whole vocabulary."""
        if self._rows is not None:
            rows = self._rows if tokens is None else self._rows[tokens]
            return lambda normalized: normalized.to(rows.dtype) @ rows.T

        def head(normalized: torch.Tensor) -> torch.Tensor:
            with self.autocast():
                logits = self.source.head(normalized[None])[0]
            return logits if tokens is None else logits[:, tokens]

        return head


@cache
def fast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns bfloat16 if the device's matmuls are clearly faster in it, else None.

    A CPU is measured: one with bfloat16 dot products but without tiles (AMX) can be slower.
    """
    if device.type == "cpu":
        faster = product_seconds(torch.bfloat16) < CLEARLY_FASTER * product_seconds(torch.float32)
    else:
        faster = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if faster else None


def product_seconds(dtype: torch.dtype) -> float:
    """Returns the shortest time of a few matmuls of [256, 1024] by [1024, 1024] on the CPU, in seconds."""
    hidden, weights = torch.zeros(256, 1024, dtype=dtype), torch.zeros(1024, 1024, dtype=dtype)
    seconds = []
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        hidden @ weights
        seconds.append(time.perf_counter() - began)
    return min(seconds)
