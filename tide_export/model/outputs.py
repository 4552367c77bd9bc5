"""Reads and replaces the hidden states in what layers and backbones return."""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, ModelOutput


def first_tensor(output) -> torch.Tensor:
    """Returns the hidden states of a layer's output.

    The output is a tensor, or a tuple or list that starts with one.
    """
    return output[0] if isinstance(output, tuple | list) else output


def with_first_tensor(output: Any, hidden: torch.Tensor) -> Any:
    """Replaces the hidden states of a layer's output."""
    return type(output)((hidden, *output[1:])) if isinstance(output, tuple | list) else hidden


def hidden_of(output: Any) -> Any:
    """Returns the hidden states [B, S, D] in a backbone's output, or in a tuple that starts with one."""
    while isinstance(output, tuple | ModelOutput):
        output = output[0]
    return output


def with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """Replaces the hidden states [B, S, D] in a backbone's output."""
    if isinstance(output, ModelOutput):
        output["last_hidden_state"] = hidden
        return output
    return (hidden if isinstance(output[0], torch.Tensor) else with_hidden(output[0], hidden), *output[1:])


def lists_beside(output: Any) -> int:
    """Returns how many lists a backbone gives in a tuple after its output; 0 if it gives no such tuple."""
    return len(output) - 1 if isinstance(output, tuple) and isinstance(output[0], ModelOutput) else 0


def hidden_alone(hidden: torch.Tensor, beside: int) -> Any:
    """Returns a backbone's output of hidden states alone, and `beside` empty lists."""
    output = _HiddenAlone(last_hidden_state=hidden)
    return (output, *([] for _ in range(beside))) if beside else output


class _HiddenAlone(BaseModelOutputWithPastAndCrossAttentions):
    """A backbone's output of which each other field (router logits and the like) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
