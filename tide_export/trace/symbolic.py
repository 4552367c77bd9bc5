"""Emits operators of domain `tide` while a model is traced, in place of what it would compute."""

from collections.abc import Sequence
from typing import Any

import torch

from tide_export.names.operators import DOMAIN


def symbolic(
    op_type: str,
    inputs: Sequence[torch.Tensor | None],
    attributes: dict[str, Any],
    shape: Sequence[int | torch.SymInt],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the result of a node `tide::op_type`, of this shape.

    Its dtype is that of the first input, which is there, by default.
    """
    first = inputs[0]
    assert first is not None
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op_type}", inputs, attributes, dtype=dtype or first.dtype, shape=shape, version=1
    )
