"""Emits the two operators of recurrent states, which `trace.recurrence` describes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers.activations import ACT2FN

from tide_export.names.operators import OP_CAUSAL_CONV, OP_RECURRENCE
from tide_export.trace.running_layer import RUNNING
from tide_export.trace.symbolic import symbolic

_EMITTED: ContextVar[Counter[int]] = ContextVar("emitted")  # operators of each layer so far


@contextmanager
def numbered_operators() -> Iterator[None]:
    """While open, operators may be emitted; they are numbered in each layer, from 0."""
    token = _EMITTED.set(Counter())
    try:
        yield
    finally:
        _EMITTED.reset(token)


def causal_conv(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Emits the convolution of `tokens` [B, S, D] with a `weight` [D, K], the last of the token itself."""
    inputs = [tokens, weight.t(), *([] if bias is None else [bias])]
    attributes = _place() | {"silu": int(activation in ("silu", "swish"))}
    output = symbolic(OP_CAUSAL_CONV, inputs, attributes, tokens.shape)
    return output if activation is None or attributes["silu"] else ACT2FN[activation](output)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Emits the recurrence of `trace.recurrence`, by the delta rule where there is a `beta`."""
    inputs = [tensor.float() for tensor in (query, key, value, decay, *([] if beta is None else [beta]))]
    return symbolic(OP_RECURRENCE, inputs, _place(), value.shape)


def decayed_sums(values: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """Sums `values` [B, S, D] up to each token, of which each token's `decays` multiply those before."""
    one = values.new_ones((*values.shape[:2], 1, 1))
    return recurrence(one, one, values[:, :, None], decays[:, :, None, None])[:, :, 0]


def delayed(tokens: torch.Tensor, by: int, before: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the `tokens` [B, S, D] that came so many before each; `before` the first, zeros or [D]."""
    weight = torch.zeros((tokens.shape[-1], by + 1), device=tokens.device)
    weight[:, 0] = 1
    output = causal_conv(tokens if before is None else tokens - before, weight)
    return output if before is None else output + before


def no_state(output: torch.Tensor) -> torch.Tensor:
    """Stands for the state after the text, which callers keep and nothing reads."""
    return output.new_zeros(1)


def _place() -> dict[str, Any]:
    """Returns the layer that runs, and the next operator's number in it."""
    layer, emitted = RUNNING.get(), _EMITTED.get()
    assert layer is not None
    emitted[layer] += 1
    return {"layer": layer, "number": emitted[layer] - 1}
