"""`tide::TideExpertMatMul` becomes one MatMul per expert over the rows that chose it.

Rows are sorted by expert, split where the next expert's begin, multiplied, joined and put back in order. An expert that
no row chose multiplies nothing and its weights are not read, so a decoding step reads the weights of the chosen experts
alone, straight from where they are stored. Each expert's matrix is a weight of its own [K, N], cut out when the model
is written.

Precondition: inputs rows [R, K], expert int64 [R], weights [E, N, K] (or [E, K, N] where `transposed`), which are a
stored tensor; quantized ones are not an input but named in the attribute `weights`, with the output's width in `width`.
Postcondition: none is left; products of one layer share one sorting.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tide_export.lower.rewriting import add_before, constant, derived_weight, drop_unused, is_weight, nodes_of
from tide_export.names import DOMAIN, OP_EXPERT_MATMUL, OP_QUANTIZED_MATMUL

INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL


@dataclass(frozen=True)
class _Sorting:
    """How the rows of one expert choice are sorted: all int64."""

    order: ir.Value  # [R], which row comes first, second, ...
    inverse: ir.Value  # [R], where each row went
    sizes: ir.Value  # [E], rows per expert


class ExpertMatMulPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model, OP_EXPERT_MATMUL, DOMAIN)
        sortings: dict[ir.Value, _Sorting] = {}
        for node in nodes:
            _lower(model, node, sortings)
        return ir.passes.PassResult(model, modified=bool(nodes))


def _lower(model: ir.Model, node: ir.Node, sortings: dict[ir.Value, _Sorting]) -> None:
    rows, expert, *stored = node.inputs
    assert rows is not None
    assert expert is not None
    weights = stored[0] if stored else None
    if weights is not None and not is_weight(weights, 3):
        return  # `lower_for_onnxruntime` refuses what is left
    count = node.attributes["num_experts"].as_int()
    transposed = bool(node.attributes["transposed"].as_int())
    if expert not in sortings:
        sortings[expert] = _sorting(model, node, expert, count)
    sorting, dtype = sortings[expert], rows.dtype
    if weights is None:
        width, wide = None, node.attributes["width"].as_int()
    else:
        width, wide = (int(weights.shape[axis]) for axis in ((1, 2) if transposed else (2, 1)))  # type: ignore[index,arg-type]
    kinds = [(dtype, [None, width])]
    sorted_rows = add_before(node, "Gather", [rows, sorting.order], {"axis": 0}, outputs=kinds, suffix="_sorted")
    parts = add_before(node, "Split", [sorted_rows.outputs[0], sorting.sizes], {"axis": 0}, outputs=kinds * count)
    kinds = [(dtype, [None, wide])]
    products = []
    for index, part in enumerate(parts.outputs):
        if weights is None:
            name = f"{node.attributes['weights'].as_strings()[0]}.{index}"
            inputs, attributes, symbol = [part], {"weights": [name]}, (OP_QUANTIZED_MATMUL, DOMAIN)
        else:
            inputs = [part, _matrix(model, weights, index, transposed, (width, wide))]  # type: ignore[arg-type]
            attributes, symbol = {}, ("MatMul", "")
        op_type, domain = symbol
        suffix = f"_{index}"
        product = add_before(node, op_type, inputs, attributes, domain=domain, outputs=kinds, suffix=suffix)
        products.append(product.outputs[0])
    joined = add_before(node, "Concat", products, {"axis": 0}, outputs=kinds).outputs[0]
    back = add_before(node, "Gather", [joined, sorting.inverse], {"axis": 0}, outputs=kinds, suffix="_back").outputs[0]
    node.outputs[0].replace_all_uses_with(back, replace_graph_outputs=True)
    drop_unused([node])


def _sorting(model: ir.Model, node: ir.Node, expert: ir.Value, count: int) -> _Sorting:
    length = add_before(node, "Shape", [expert], outputs=[(INT64, [1])], suffix="_rows").outputs[0]
    kinds = [(INT64, [None]), (INT64, [None])]
    ascending = {"axis": 0, "largest": 0, "sorted": 1}
    _, order = add_before(node, "TopK", [expert, length], ascending, outputs=kinds, suffix="_order").outputs
    _, inverse = add_before(node, "TopK", [order, length], ascending, outputs=kinds, suffix="_inverse").outputs
    numbers = constant(model, f"experts_{count}", np.arange(count, dtype=np.int64)[:, None])
    chosen = add_before(node, "Equal", [expert, numbers], outputs=[(BOOL, [count, None])], suffix="_chosen").outputs[0]
    ones = add_before(
        node, "Cast", [chosen], {"to": INT64.value}, outputs=[(INT64, [count, None])], suffix="_chosen"
    ).outputs[0]
    axis = constant(model, "axis_1", np.array([1], dtype=np.int64))
    sizes = add_before(node, "ReduceSum", [ones, axis], {"keepdims": 0}, outputs=[(INT64, [count])], suffix="_sizes")
    return _Sorting(order, inverse, sizes.outputs[0])


def _matrix(model: ir.Model, weights: ir.Value, index: int, transposed: bool, shape: tuple[int, int]) -> ir.Value:
    tensor = weights.const_value
    assert tensor is not None
    return derived_weight(
        model,
        f"{weights.name}.{index}",
        shape,
        weights.dtype or ir.DataType.FLOAT,
        lambda: np.ascontiguousarray(tensor.numpy()[index] if transposed else tensor.numpy()[index].T),
    )
