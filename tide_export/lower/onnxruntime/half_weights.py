"""Stores weights in 16 bits where that loses nothing.

An operator of `cpp/ops` multiplies by them.

Every matrix that a MatMul or Gemm multiplies by, or a Gather reads rows of, and whose numbers are all of that type,
is stored once, as [N, K]: rows of K weights, one row an output. So a head tied to the embedding shares its table.
Sums are float32. The operators, `tide::TideBf16MatMul` and `TideFp16MatMul`, are also model-local functions of standard
operators, which ONNX Runtime inlines where the library is not registered: it then widens the weights as it loads them.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from tide_export.graph.builder import OPSET, GraphBuilder, Weights
from tide_export.graph.rewriting import (
    FLOAT,
    HALF,
    WidenedTensor,
    derived_weight,
    is_weight,
    nodes_of,
    op_before,
    replace_value,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_HALF_MATMUL

ROWS = 4096  # of a matrix that are compared at a time
MIN_SIZE = 16  # rows and columns, as of matrices that are quantized


class HalfWeightsPass(ir.passes.InPlacePass):
    def __init__(self, weights: str):
        """`weights`: "bf16" or "fp16"."""
        super().__init__()
        self.weights, self.dtype = weights, HALF[weights]
        self._exact: dict[ir.Value, bool] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = len(self._exact)
        for node in nodes_of(model.graph, "MatMul"):
            if self._is_exact(node.inputs[1]):
                weights = self._stored(model.graph, node.inputs[1], transposed=True)
                replace_value(node.outputs[0], self._product(node, weights))
        for node in nodes_of(model.graph, "Gemm"):
            if _is_product(node) and self._is_exact(node.inputs[1]):
                transposed = not node.attributes.get_int("transB", 0)
                result = self._product(node, self._stored(model.graph, node.inputs[1], transposed))
                bias = node.inputs[2] if len(node.inputs) > 2 else None
                if bias is not None:
                    result = op_before(node, "Add", [result, bias], dtype=FLOAT, shape=result.shape)
                replace_value(node.outputs[0], result)
        for node in nodes_of(model.graph, "Gather"):
            if node.attributes.get_int("axis", 0) == 0 and self._is_exact(node.inputs[0]):
                rows, output = self._stored(model.graph, node.inputs[0], transposed=False), node.outputs[0]
                inputs = [rows, node.inputs[1]]
                gathered = op_before(node, "Gather", inputs, dtype=self.dtype, shape=output.shape)
                widened = op_before(node, "Cast", [gathered], {"to": FLOAT.value}, dtype=FLOAT, shape=output.shape)
                replace_value(output, widened)
        if nodes_of(model.graph, OP_HALF_MATMUL[self.weights], DOMAIN):
            function = half_matmul_function(self.weights, OPSET)
            model.functions[function.identifier()] = function
        return ir.passes.PassResult(model, modified=len(self._exact) > before)

    def _is_exact(self, weight: ir.Value | None) -> bool:
        """Whether `weight` is a float32 matrix of a size that matters, all of numbers that the type has."""
        if weight is None or not is_weight(weight, 2) or weight.dtype != FLOAT:
            return False
        if min(static_dim(weight, 0), static_dim(weight, 1)) < MIN_SIZE:
            return False
        if weight not in self._exact:
            self._exact[weight] = is_exact_in(self.dtype.numpy(), required(weight.const_value))
        return self._exact[weight]

    def _product(self, node: ir.Node, weights: ir.Value) -> ir.Value:
        """`weights`: [N, K]."""
        inputs, shape = [node.inputs[0], weights], node.outputs[0].shape
        return op_before(node, OP_HALF_MATMUL[self.weights], inputs, domain=DOMAIN, dtype=FLOAT, shape=shape)

    def _stored(self, graph: ir.Graph, weight: ir.Value | None, transposed: bool) -> ir.Value:
        """The weight [N, K] in 16 bits; `transposed`: it is now [K, N]."""
        weight = required(weight)
        rows, columns = static_dim(weight, 0), static_dim(weight, 1)
        name = str(weight.name)
        if transposed:  # `lower.transposed_weights` names a transposed weight so
            name, rows, columns = name.removesuffix(".T") if name.endswith(".T") else f"{name}.T", columns, rows
        numbers = narrowed(weight, self.dtype, transposed)
        return derived_weight(graph, f"{name}.{self.weights}", (rows, columns), self.dtype, numbers)


def half_matmul_function(weights_type: str, opset: int) -> ir.Function:
    """The operator for that type, (x [.., K], weights [N, K]) -> y [.., N], in standard operators."""
    name = OP_HALF_MATMUL[weights_type]
    x, weights = ir.Value(name="x"), ir.Value(name="weights")
    body = GraphBuilder(name, Weights())
    widened = body.op("Cast", [weights], {"to": FLOAT.value})
    y = body.op("MatMul", [x, body.op("Transpose", [widened], {"perm": [1, 0]})])
    return body.function(name, [x, weights], {"y": y}, opset)


def _is_product(gemm: ir.Node) -> bool:
    attributes = gemm.attributes
    scaled = attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0
    return not scaled and not attributes.get_int("transA", 0)


def is_exact_in(half: np.dtype, tensor: ir.TensorProtocol) -> bool:
    """Whether all numbers of `tensor` are of that type."""
    if isinstance(tensor, WidenedTensor) and tensor.stored.dtype == half:
        return True
    values = tensor.numpy()
    values = values.reshape(-1, values.shape[-1])
    with np.errstate(over="ignore"):  # some rows at a time: the weight may be read for this alone
        parts = (values[first : first + ROWS] for first in range(0, len(values), ROWS))
        return all(np.array_equal(part.astype(half).astype(np.float32), part) for part in parts)


def narrowed(weight: ir.Value, dtype: ir.DataType, transposed: bool) -> Callable[[], np.ndarray]:
    """Returns what computes the numbers of `weight` in that type.

    `transposed`: with the last two axes swapped.
    """
    tensor = required(weight.const_value)

    def compute() -> np.ndarray:
        values = tensor.stored if isinstance(tensor, WidenedTensor) else tensor.numpy()
        values = values.astype(dtype.numpy(), copy=False)
        return np.ascontiguousarray(values.swapaxes(-1, -2) if transposed else values)

    return compute
