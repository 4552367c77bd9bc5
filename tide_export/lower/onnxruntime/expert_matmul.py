"""Replaces `tide::TideExpertMatMul` by one MatMul per expert over the rows that chose it.

Rows are sorted by expert, split where the next expert's begin, multiplied, concatenated and put back in order. An
expert that no row chose multiplies nothing and its weights are not read, so a decoding step reads only the weights of
the chosen experts, from where they are stored. Each expert's matrix becomes a weight [K, N], sliced out when the model
is written. The matmuls of one layer share one sorting.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    BOOL,
    INT64,
    derived_weight,
    ensure_none_left,
    integers,
    is_weight,
    nodes_of,
    op_before,
    ops_before,
    replace_value,
    require_arity,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_EXPERT_MATMUL, OP_QUANTIZED_MATMUL


@dataclass(frozen=True)
class _Sorting:
    """How the rows of one expert choice are sorted: all int64."""

    order: ir.Value  # [R], the row at each sorted position
    inverse: ir.Value  # [R], the sorted position of each row
    sizes: ir.Value  # [E], rows per expert


class ExpertMatMulPass(ir.passes.InPlacePass):
    """Replaces every node by matmuls of sorted rows.

    Inputs of a node: rows [R, K], expert int64 [R], and stored weights [E, N, K] (or [E, K, N] where `transposed`);
    quantized weights are not an input but named in the attribute `weights`, with their N in `width`.
    """

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_EXPERT_MATMUL, inputs=(2, 3))
        for node in nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN):
            if not all(is_weight(weights, 3) for weights in node.inputs[2:]):
                raise ir.passes.PreconditionError(f"the expert weights of {node.name} are not stored tensors")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN)
        sortings: dict[ir.Value, _Sorting] = {}
        for node in nodes:
            _lower(model.graph, node, sortings)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN))


def _lower(graph: ir.Graph, node: ir.Node, sortings: dict[ir.Value, _Sorting]) -> None:
    rows, expert, *stored = map(required, node.inputs)
    count = node.attributes["num_experts"].as_int()
    transposed = bool(node.attributes["transposed"].as_int())
    if expert not in sortings:
        sortings[expert] = _sorting(graph, node, expert, count)
    sorting, dtype = sortings[expert], rows.dtype
    if stored:
        k, n = (static_dim(stored[0], axis) for axis in ((1, 2) if transposed else (2, 1)))
    else:
        k, n = None, node.attributes["width"].as_int()
    sorted_rows = op_before(
        node, "Gather", [rows, sorting.order], {"axis": 0}, dtype=dtype, shape=[None, k], suffix="_sorted"
    )
    parts = ops_before(node, "Split", [sorted_rows, sorting.sizes], {"axis": 0}, types=[(dtype, [None, k])] * count)
    results, shape = [], [None, n]
    for index, part in enumerate(parts):
        suffix = f"_{index}"
        if stored:
            inputs = [part, _matrix(graph, stored[0], index, transposed)]
            results.append(op_before(node, "MatMul", inputs, dtype=dtype, shape=shape, suffix=suffix))
        else:
            weights = {"weights": [f"{node.attributes['weights'].as_strings()[0]}.{index}"]}
            result = op_before(
                node, OP_QUANTIZED_MATMUL, [part], weights, domain=DOMAIN, dtype=dtype, shape=shape, suffix=suffix
            )
            results.append(result)
    joined = op_before(node, "Concat", results, {"axis": 0}, dtype=dtype, shape=shape)
    inputs = [joined, sorting.inverse]
    restored = op_before(node, "Gather", inputs, {"axis": 0}, dtype=dtype, shape=shape, suffix="_restored")
    replace_value(node.outputs[0], restored)


def _sorting(graph: ir.Graph, node: ir.Node, expert: ir.Value, count: int) -> _Sorting:
    length = op_before(node, "Shape", [expert], dtype=INT64, shape=[1], suffix="_rows")
    types = [(INT64, [None]), (INT64, [None])]
    ascending = {"axis": 0, "largest": 0, "sorted": 1}
    _, order = ops_before(node, "TopK", [expert, length], ascending, types=types, suffix="_order")
    _, inverse = ops_before(node, "TopK", [order, length], ascending, types=types, suffix="_inverse")
    numbers, shape = integers(graph, f"experts_{count}", np.arange(count)[:, None]), [count, None]
    chosen = op_before(node, "Equal", [expert, numbers], dtype=BOOL, shape=shape, suffix="_chosen")
    ones = op_before(node, "Cast", [chosen], {"to": INT64.value}, dtype=INT64, shape=shape, suffix="_chosen")
    inputs = [ones, integers(graph, "axis_1", [1])]
    sizes = op_before(node, "ReduceSum", inputs, {"keepdims": 0}, dtype=INT64, shape=[count], suffix="_sizes")
    return _Sorting(order, inverse, sizes)


def _matrix(graph: ir.Graph, weights: ir.Value, index: int, transposed: bool) -> ir.Value:
    """Expert `index`'s weights as [K, N]."""
    tensor = required(weights.const_value)
    _, first, second = tensor.shape.numpy()
    return derived_weight(
        graph,
        f"{weights.name}.{index}",
        (first, second) if transposed else (second, first),
        tensor.dtype,
        lambda: np.ascontiguousarray(tensor.numpy()[index] if transposed else tensor.numpy()[index].T),
    )
