"""Stores weights transposed that are transposed at run time.

A tied head multiplies by the embedding itself.

The exporter folds `Transpose(weight)` only up to some size. ONNX Runtime would fold the rest at every load, holding
both copies. If the weight is also read untransposed (an output head tied to the embedding), a `Gemm(transB=1)` on the
one stored tensor computes the same, so a tied bundle stores its embedding once.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    WidenedTensor,
    derived_weight,
    drop_unused,
    ensure_none_left,
    integers,
    is_weight,
    nodes_of,
    op_before,
    rank,
    register,
    replace_value,
    required,
    static_dim,
)


class TransposedWeightsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for transpose, matmuls in _transposed_for_matmuls(model):
            weight = required(transpose.inputs[0])
            if len(weight.uses()) > 1:
                for matmul in matmuls:
                    _multiply_by_transposed(model.graph, matmul, weight)
            else:
                transpose.outputs[0].replace_all_uses_with(_transposed(model.graph, weight))
            drop_unused([transpose])
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(transpose for transpose, _ in _transposed_for_matmuls(model))


def _transposed_for_matmuls(model: ir.Model) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Every Transpose of a weight that is read by MatMuls alone, with its readers."""
    for node in nodes_of(model.graph, "Transpose"):
        if not is_weight(node.inputs[0], 2) or list(node.attributes.get_ints("perm", [1, 0])) != [1, 0]:
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if readers and all(reader.op_type == "MatMul" for reader in readers):
            yield node, readers


def _transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    tensor, name = required(weight.const_value), f"{weight.name}.T"
    if isinstance(tensor, WidenedTensor):
        return graph.initializers.get(name) or register(graph, WidenedTensor(name, tensor.stored.T))
    shape = tensor.shape.numpy()[::-1]
    return derived_weight(graph, name, shape, tensor.dtype, lambda: np.ascontiguousarray(tensor.numpy().T))


def _multiply_by_transposed(graph: ir.Graph, matmul: ir.Node, weight: ir.Value) -> None:
    """Replaces MatMul(x, Transpose(w)) by Reshape, Gemm(transB=1) and Reshape.

    x [.., D], w [V, D]; a matrix x needs no Reshape.
    """
    x, output, dtype = matmul.inputs[0], matmul.outputs[0], weight.dtype
    if rank(x) == 2:
        gemm = op_before(matmul, "Gemm", [x, weight], {"transB": 1}, dtype=dtype, shape=output.shape)
        replace_value(output, gemm)
        return
    columns, width = static_dim(weight, 0), static_dim(weight, 1)
    rows = integers(graph, f"rows_of_{width}", [-1, width])
    flat = op_before(matmul, "Reshape", [x, rows], dtype=dtype, shape=[None, width], suffix="_rows")
    gemm = op_before(matmul, "Gemm", [flat, weight], {"transB": 1}, dtype=dtype, shape=[None, columns])
    target = integers(graph, f"tokens_of_{columns}", [1, -1, columns])
    shape = output.shape if output.shape is not None else [1, None, columns]
    restored = op_before(matmul, "Reshape", [gemm, target], dtype=dtype, shape=shape, suffix="_tokens")
    replace_value(output, restored)
