"""Weights that are transposed at run time are stored transposed; a tied head multiplies by the embedding itself.

The exporter folds `Transpose(weight)` only up to some size. ONNX Runtime would fold the rest at every load, holding
both copies. Where the weight is also read untransposed (an output head tied to the embedding) a `Gemm(transB=1)` on the
one stored tensor does the same product, so a tied bundle holds its embedding once.

Postcondition: no Transpose of an initializer feeds a MatMul.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from tide_export.lower.rewriting import add_before, constant, derived_weight, drop_unused, is_weight, last_dim, nodes_of


class TransposedWeightsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in nodes_of(model, "Transpose"):
            weight = node.inputs[0]
            if weight is None or not is_weight(weight, 2) or list(node.attributes.get_ints("perm", [1, 0])) != [1, 0]:
                continue
            readers = [use.node for use in node.outputs[0].uses()]
            if not readers or any(reader.op_type != "MatMul" for reader in readers):
                continue
            if len(weight.uses()) > 1:
                for reader in readers:
                    _multiply_by_transposed(model, reader, weight)
            else:
                rows, columns = (int(dim) for dim in weight.shape.dims)  # type: ignore[union-attr, arg-type]
                stored = derived_weight(
                    model,
                    f"{weight.name}.T",
                    [columns, rows],
                    weight.dtype or ir.DataType.FLOAT,
                    _turned(weight),
                )
                node.outputs[0].replace_all_uses_with(stored)
            drop_unused([node])
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _turned(weight: ir.Value) -> Callable[[], np.ndarray]:
    tensor = weight.const_value
    assert tensor is not None
    return lambda: np.ascontiguousarray(tensor.numpy().T)


def _multiply_by_transposed(model: ir.Model, matmul: ir.Node, weight: ir.Value) -> None:
    """MatMul(x, Transpose(w)) -> Reshape, Gemm(transB=1), Reshape; x [.., D], w [V, D]. A matrix x needs no Reshape."""
    x, output = matmul.inputs[0], matmul.outputs[0]
    width, columns = last_dim(x), int(weight.shape[0])  # type: ignore[index, arg-type]
    dtype = weight.dtype
    if x is not None and x.shape is not None and len(x.shape) == 2:
        gemm = add_before(matmul, "Gemm", [x, weight], {"transB": 1}, outputs=[(dtype, output.shape)])
        _take_over(matmul, gemm.outputs[0])
        return
    rows = constant(model, f"rows_of_{width}", np.array([-1, width], dtype=np.int64))
    flat = add_before(matmul, "Reshape", [x, rows], outputs=[(dtype, [None, width])], suffix="_rows").outputs[0]
    gemm = add_before(matmul, "Gemm", [flat, weight], {"transB": 1}, outputs=[(dtype, [None, columns])])
    dims = list(output.shape) if output.shape is not None else [1, None, columns]
    target = constant(model, f"tokens_of_{columns}", np.array([1, -1, columns], dtype=np.int64))
    back = add_before(matmul, "Reshape", [gemm.outputs[0], target], outputs=[(dtype, dims)], suffix="_tokens")
    _take_over(matmul, back.outputs[0])


def _take_over(matmul: ir.Node, new: ir.Value) -> None:
    """`new` stands where the product stood, under its name."""
    old = matmul.outputs[0]
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    drop_unused([matmul])
    new.name = name
