"""Replaces `tide::TideQuantizedMatMul` by a MatMul of dequantized weights.

ModelOpt writes them for TensorRT in this form.

Integers of 4 bits have a DequantizeLinear by blocks along K, and TensorRT multiplies by what it dequantizes as it reads
them. For matrices in FP8 a QuantizeLinear and a DequantizeLinear round the input too, and TensorRT multiplies in FP8.
Scales have the type of the hidden states, which is the type that is computed in.
"""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    constant,
    derived_weight,
    ensure_none_left,
    nodes_of,
    op_before,
    replace_value,
    required,
)
from tide_export.model.quantized_weights import Blocks, Fp8Matrix, IntegerMatrix
from tide_export.names.operators import DOMAIN, OP_QUANTIZED_MATMUL

FP8, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.INT4


class QuantizedMatMulsPass(ir.passes.InPlacePass):
    """Inputs of each node: hidden states [..., K] in half precision, and an optional bias [N]."""

    def __init__(self, blocks: Mapping[str, IntegerMatrix | Fp8Matrix]):
        """`blocks`: the matrices by the names the nodes use; integers of 4 bits without zero points."""
        super().__init__()
        self.blocks = blocks

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_QUANTIZED_MATMUL, DOMAIN)
        rounded: dict[tuple[ir.Value, float], ir.Value] = {}
        for node in nodes:
            self._lower(model.graph, node, rounded)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_QUANTIZED_MATMUL, DOMAIN))

    def _lower(self, graph: ir.Graph, node: ir.Node, rounded: dict[tuple[ir.Value, float], ir.Value]) -> None:
        """`rounded`: inputs that are rounded already, by what they were and their scale."""
        (name,) = node.attributes["weights"].as_strings()
        x, *bias = map(required, node.inputs)
        matrix, dtype, output = self.blocks[name], required(x.dtype), node.outputs[0]
        if isinstance(matrix, Fp8Matrix):
            if (x, matrix.input_scale) not in rounded:
                rounded[x, matrix.input_scale] = _rounded(graph, node, x, matrix.input_scale)
            x = rounded[x, matrix.input_scale]
            weight = _weight(graph, name, matrix, FP8, lambda: matrix.numbers.T)
            scale, blocks = _scale(graph, matrix.scale, dtype), {}
        else:
            assert isinstance(matrix, Blocks)
            assert matrix.symmetric
            weight = _weight(graph, name, matrix, INT4, lambda: matrix.signed().T.astype(ml_dtypes.int4))
            scales = np.ascontiguousarray(matrix.scales.T).astype(dtype.numpy())
            scale, blocks = constant(graph, f"{name}.scales", scales), {"axis": 0, "block_size": matrix.block_size}
        shape = [matrix.columns, matrix.rows]
        dequantized = op_before(node, "DequantizeLinear", [weight, scale], blocks, dtype=dtype, shape=shape)
        product = op_before(node, "MatMul", [x, dequantized], dtype=dtype, shape=output.shape)
        if bias:
            product = op_before(node, "Add", [product, *bias], dtype=dtype, shape=output.shape)
        replace_value(output, product)


def _weight(
    graph: ir.Graph, name: str, matrix: Blocks | Fp8Matrix, dtype: ir.DataType, compute: Callable[[], np.ndarray]
) -> ir.Value:
    """The numbers of a matrix as a weight [K, N]."""
    shape = [matrix.columns, matrix.rows]
    return derived_weight(graph, f"{name}.numbers", shape, dtype, lambda: np.ascontiguousarray(compute()))


def _scale(graph: ir.Graph, scale: float, dtype: ir.DataType) -> ir.Value:
    return constant(graph, f"scale_{scale!r}", np.array(scale, dtype.numpy()))


def _rounded(graph: ir.Graph, node: ir.Node, x: ir.Value, scale: float) -> ir.Value:
    """`x` rounded to FP8, before `node`."""
    by, dtype = _scale(graph, scale, required(x.dtype)), x.dtype
    zero = constant(graph, "fp8_zero", np.array(0, ml_dtypes.float8_e4m3fn))  # it says which type to round to
    numbers = op_before(node, "QuantizeLinear", [x, by, zero], dtype=FP8, shape=x.shape)
    return op_before(node, "DequantizeLinear", [numbers, by], dtype=dtype, shape=x.shape, suffix="_input")
