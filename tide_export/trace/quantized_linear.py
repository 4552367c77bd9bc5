"""Makes the quantized matrices of a model appear in the trace as symbolic products and look-ups, by name.

`tide::TideQuantizedMatMul` (states [..., K], bias [N] where there is one -> [..., N]) and `tide::TideQuantizedGather`
(token ids [B, S] -> [B, S, K]) say in their attribute `weights` which matrix they mean; its integers join them in
`lower`. So no float32 copy of a quantized matrix gets into the graph, and no rewrite has to find it again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names import DOMAIN, OP_QUANTIZED_GATHER, OP_QUANTIZED_MATMUL
from tide_export.quantize.matrices import is_linear, parameter_names


@contextmanager
def symbolic_products(model: PreTrainedModel, quantized: QuantizedWeights | None) -> Iterator[None]:
    """While open, modules whose weight is among `quantized` emit symbolic operators; others are left alone."""
    if quantized is None:
        yield
        return
    names = parameter_names(model)
    known = {
        module: names[id(module.weight)]
        for module in model.modules()
        if (is_linear(module) or isinstance(module, nn.Embedding)) and names[id(module.weight)] in quantized.blocks
    }
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D, nn.Embedding)
    own: dict[type[nn.Module], Callable] = {kind: kind.forward for kind in kinds}

    def forward_of(kind: type[nn.Module]) -> Callable:
        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if self not in known:
                return own[kind](self, x)
            blocks = quantized.blocks[known[self]]
            if kind is nn.Embedding:
                return quantized_gather(known[self], x, blocks.columns)
            return quantized_product(known[self], x, blocks.rows, self.bias)  # type: ignore[arg-type]

        return forward

    for kind in kinds:
        kind.forward = forward_of(kind)
    try:
        yield
    finally:
        for kind in kinds:
            kind.forward = own[kind]


def quantized_product(name: str, x: torch.Tensor, rows: int, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [..., K] times the matrix `name` [N, K], plus `bias`; N = `rows`."""
    inputs = (x,) if bias is None else (x, bias)
    return _symbol(OP_QUANTIZED_MATMUL, name, inputs, (*x.shape[:-1], rows), x.dtype)


def quantized_gather(name: str, ids: torch.Tensor, columns: int) -> torch.Tensor:
    """The rows `ids` of the matrix `name`."""
    return _symbol(OP_QUANTIZED_GATHER, name, (ids,), (*ids.shape, columns), torch.float32)


def _symbol(op_type: str, name: str, inputs: tuple, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    attributes: dict[str, Any] = {"weights": [name]}
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{op_type}", inputs, attributes, dtype=dtype, shape=shape, version=1)
