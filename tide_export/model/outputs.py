"""Reads and replaces the hidden states in what layers and backbones return."""

from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput


def first_tensor(output) -> torch.Tensor:
    """Returns the hidden states of a layer's output.

    The output is a tensor, or a tuple or list that starts with one.
    """
    return output[0] if isinstance(output, tuple | list) else output


def with_first_tensor(output: Any, hidden: torch.Tensor) -> Any:
    """Replaces the hidden states of a layer's output."""
    return type(output)((hidden, *output[1:])) if isinstance(output, tuple | list) else hidden


def with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """Replaces the hidden states [B, S, D] in a backbone's output."""
    if isinstance(output, ModelOutput):
        output["last_hidden_state"] = hidden
        return output
    return (hidden, *output[1:])
