"""Replaces positions that a model counts from the start of a pass by position_ids.

A model may make its positions itself, `arange(tokens)`, or take the first rows of a table, `table[:tokens]`. A pass of
a traced graph holds one whole sequence, so that is the same as its position ids; a step holds a few tokens of one. Runs
on the trace before it is cut, when attention and its masks are one operator. What else counts the tokens of a pass is
refused: it would count from 0 in every step.
"""

import onnx_ir as ir

from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import Dim, dims, drop_unused, integers, nodes_of, op_before, replace_value, required


class CountedPositionsPass(ir.passes.InPlacePass):
    """Makes positions one row [S] for all sequences: a graph with such holds one sequence."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        token_ids, positions = graph.inputs
        tokens = dims(token_ids)[1]
        counted = [node for node in nodes_of(graph, "Range") if _counts(node, tokens)]
        rows = [node for node in nodes_of(graph, "Slice") if _takes_rows(node, tokens)]
        for node in (*counted, *rows):
            (output,), axis = node.outputs, integers(graph, "axis_0", [0])
            index = op_before(node, "Squeeze", [positions, axis], dtype=positions.dtype, shape=[tokens])
            if node in rows:
                shape = [tokens if at == _axis(node) else dim for at, dim in enumerate(dims(output))]
                inputs, attributes = [node.inputs[0], index], {"axis": _axis(node)}
                value = op_before(node, "Gather", inputs, attributes, dtype=output.dtype, shape=shape)
            else:
                to = required(output.dtype)
                value = op_before(node, "Cast", [index], {"to": to.value}, dtype=to, shape=[tokens])
            replace_value(output, value)
        for node in (*nodes_of(graph, "Range"), *nodes_of(graph, "CumSum")):
            drop_unused([node])
            if node.graph is not None and _runs_over(node, tokens):
                raise UnsupportedModelError(
                    f"it counts positions from the first token of a pass ({node.op_type}), which would start at 0 in "
                    "every step, so it cannot be exported: let it read position_ids"
                )
        return ir.passes.PassResult(model, modified=bool(counted or rows))


def _counts(node: ir.Node, tokens: Dim) -> bool:
    """Whether `node` is Range(0, tokens, 1)."""
    start, _, step = node.inputs
    return _number(start) == 0 and _number(step) == 1 and _runs_over(node, tokens)


def _takes_rows(node: ir.Node, tokens: Dim) -> bool:
    """Whether `node` takes as many first rows of a constant table as there are tokens."""
    table, start, _, _, step = (*node.inputs, None, None)[:5]
    if table is None or table.const_value is None or start is None or dims(start) != [1] or _number(start) != 0:
        return False
    rows, taken = dims(table)[_axis(node)], dims(node.outputs[0])[_axis(node)]
    return (step is None or _number(step) == 1) and str(taken) in (str(tokens), f"Min({rows}, {tokens})")


def _runs_over(node: ir.Node, tokens: Dim) -> bool:
    """Whether a Range or CumSum from a constant start goes over the tokens."""
    axis = 0 if node.op_type == "Range" else int(_number(node.inputs[1]) or 0)
    from_start = node.op_type == "CumSum" or _number(node.inputs[0]) is not None
    return from_start and node.outputs[0].shape is not None and dims(node.outputs[0])[axis] == tokens


def _axis(node: ir.Node) -> int:
    axes = node.inputs[3] if len(node.inputs) > 3 else None
    return int(_number(axes) or 0) % len(dims(node.inputs[0]))


def _number(value: ir.Value | None) -> float | None:
    array = value.const_value.numpy() if value is not None and value.const_value is not None else None
    return float(array.reshape(())) if array is not None and array.size == 1 else None
