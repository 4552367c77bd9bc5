"""Makes quantized matrices appear in the trace as symbolic products and look-ups, by name.

`tide::TideQuantizedMatMul` (hidden [..., K], optional bias [N] -> [..., N]) and `tide::TideQuantizedGather` (token ids
[B, S] -> [B, S, K]) name their matrix in the attribute `weights`; `lower` adds its integers. So the graph never holds a
float32 copy of a quantized matrix, and no rewrite has to find it again. A matrix whose file has its columns in
another order gets hidden states in that order, once where modules one after the other read the same in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tide_export.model.quantized_integers import SourceMatrix
from tide_export.model.quantized_weights import Fp8Matrix, QuantizedWeights
from tide_export.names.operators import OP_QUANTIZED_GATHER, OP_QUANTIZED_MATMUL
from tide_export.quantize.matrices import is_linear, parameter_names
from tide_export.trace.symbolic import symbolic


@contextmanager
def symbolic_quantized(model: PreTrainedModel, quantized: QuantizedWeights | None) -> Iterator[None]:
    """While open, modules of `model` whose weight is among `quantized` emit symbolic operators."""
    if quantized is None:
        yield
        return
    names = parameter_names(model)
    weights = {
        module: names[id(module.weight)]
        for module in model.modules()
        if (is_linear(module) or isinstance(module, nn.Embedding)) and names[id(module.weight)] in quantized.blocks
    }
    orders = _orders(weights, quantized)
    last: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        if not last or last[0][0] is not x or last[0][1] is not order:
            last[:] = [(x, order, x.index_select(-1, order))]
        return last[0][2]

    originals: dict[type[nn.Module], Callable] = {kind: kind.forward for kind in (nn.Linear, Conv1D, nn.Embedding)}

    def forward_of(kind: type[nn.Module]) -> Callable:
        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if self not in weights:
                return originals[kind](self, x)
            blocks = quantized.blocks[weights[self]]
            attributes: dict[str, Any] = {"weights": [weights[self]]}
            if kind is nn.Embedding:
                return symbolic(OP_QUANTIZED_GATHER, [x], attributes, (*x.shape, blocks.columns), torch.float32)
            if self in orders:
                x = in_order(x, orders[self])
            attributes["bits"] = [0 if isinstance(blocks, Fp8Matrix) else blocks.bits]
            inputs = [x] if self.bias is None else [x, self.bias]
            return symbolic(OP_QUANTIZED_MATMUL, inputs, attributes, (*x.shape[:-1], blocks.rows))  # type: ignore[arg-type]

        return forward

    for kind in originals:
        kind.forward = forward_of(kind)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.forward = original


def _orders(weights: Mapping[nn.Module, str], quantized: QuantizedWeights) -> dict[nn.Module, torch.Tensor]:
    """The order of the columns of each module that has one, int64 [K]; equal ones are one tensor."""
    orders, tensors = {}, dict[bytes, torch.Tensor]()
    for module, name in weights.items():
        matrix = quantized.blocks[name]
        if isinstance(matrix, SourceMatrix) and matrix.order is not None:
            orders[module] = tensors.setdefault(matrix.order.tobytes(), torch.from_numpy(matrix.order))
    return orders
