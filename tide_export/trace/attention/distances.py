"""Traces biases by distance as each query has them, before they are laid out over the keys.

In some models (Inkling) a query adds a number of its own to the score of a key at distance 0, 1, .. extent - 1, and
none to those farther away. Their module lays these numbers out over all keys of a pass; the attention operator knows
where keys are, so it takes the numbers themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def biases_by_distance(attention: nn.Module) -> bool:
    """Whether the position bias of `attention` is one number per query, head and distance."""
    return any(map(_lays_out, attention.children()))


@contextmanager
def by_distance(model: PreTrainedModel) -> Iterator[None]:
    """While open, position biases of `model` are [B, H, S, extent] by distance instead of [B, H, S, keys]."""
    modules = [module for module in model.modules() if _lays_out(module)]
    try:
        for module in modules:
            module.forward = partial(_bias, module)
        yield
    finally:
        for module in modules:
            del module.forward


def _lays_out(module: nn.Module) -> bool:
    return isinstance(getattr(module, "rel_extent", None), int) and "proj" in module._parameters


def _bias(module: Any, relative_states: torch.Tensor, *_positions: torch.Tensor) -> torch.Tensor:
    """States [B, S, H, R] and profiles [R, extent] -> [B, H, S, extent]."""
    return (relative_states @ module.proj).transpose(1, 2)
