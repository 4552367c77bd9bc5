"""Keeps new tokens on the second axis in a mixture of experts.

So it can be part of one operator of layers. Models merge batch and tokens around it: hidden states [N, D] between
Reshapes from and to [1, N, D]. What multiplies by the experts, and all after it that computes every row alike, is
computed with the first axis kept; what it reads of other nodes (the choice of the experts and their shares) gets one.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tide_export.graph.rewriting import (
    Dim,
    dims,
    graph_of,
    integers,
    new_node,
    nodes_of,
    numbers_of,
    rank,
    required,
)
from tide_export.names.operators import (
    DOMAIN,
    INTEGER_EXPERTS,
    INTEGER_MATMULS,
    OP_GATE,
    OP_GATED_MATMUL,
    OP_HALF_EXPERTS,
    OP_HALF_MATMUL,
)

EXPERTS = (*OP_HALF_EXPERTS.values(), *INTEGER_EXPERTS)
MATMULS = (*OP_HALF_MATMUL.values(), *INTEGER_MATMULS)
ROWS = {*EXPERTS, *MATMULS, *(OP_GATED_MATMUL[name] for name in MATMULS), OP_GATE}  # of the project
ELEMENTWISE = {"Sigmoid", "Softplus", "Exp", "Gelu", "Mul", "Add", "Clip"}


class ExpertRowsPass(ir.passes.InPlacePass):
    """After the passes that choose the operators of matmuls."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified, of_experts = False, _of_experts(model.graph)
        for node in nodes_of(model.graph, "Reshape"):
            if node.inputs[0] in of_experts and _keeps_rows(node, added=1):
                modified |= _replace(model.graph, node)
        return ir.passes.PassResult(model, modified=modified)


def _keeps_rows(reshape: ir.Node, added: int) -> bool:
    """Whether a Reshape only adds the first of its axes, of size 1 (or removes it: -1)."""
    short, long = (reshape.inputs[0], reshape.outputs[0])[:: 1 if added == 1 else -1]
    if reshape.op_type != "Reshape" or rank(short) is None or rank(long) != required(rank(short)) + 1:
        return False
    return dims(long)[0] == 1 and dims(long)[2:] == dims(short)[1:] and None not in dims(short)[1:]


def _of_experts(graph: ir.Graph) -> set[ir.Value | None]:
    """Returns the values computed from products with experts by nodes that compute every row alike."""
    found = set[ir.Value | None]()
    for node in graph.all_nodes():
        if (node.op_type in EXPERTS or not found.isdisjoint(node.inputs)) and _computes_rows(node):
            found.update(node.outputs)
    return found


def _computes_rows(node: ir.Node) -> bool:
    """Whether the node computes every row of its input [N, ..] alike, whatever axes are before the rows'."""
    weights = [value for value in node.inputs[1:] if value is not None and value.is_initializer()]
    of_rank = rank(node.inputs[0])
    if of_rank is None or of_rank < 2:
        return False
    if node.domain == DOMAIN:
        return node.op_type in ROWS and all(rank(value) is not None for value in node.outputs)
    if node.domain:
        return False
    if node.op_type in ELEMENTWISE:
        return all(required(rank(value)) < of_rank for value in weights)
    axis = node.attributes.get_int("axis", 0)
    if node.op_type == "Split":
        return axis in (-1, of_rank - 1)
    if node.op_type == "Unsqueeze":
        return all(0 < axis <= of_rank for axis in numbers_of(node.inputs[1]) or [0])
    return _is_last_slice(node) if node.op_type == "Slice" else _sums_choices(node)


def _is_last_slice(node: ir.Node) -> bool:
    """Whether a Slice is of the last axis alone."""
    axes = numbers_of(node.inputs[3]) if len(node.inputs) > 3 else None
    return axes is not None and axes in ([-1], [required(rank(node.inputs[0])) - 1])


def _sums_choices(node: ir.Node) -> bool:
    """Whether a ReduceSum adds up the second axis of hidden states [N, k, D]."""
    axes = numbers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    keeps = node.attributes.get_int("keepdims", 1)
    return node.op_type == "ReduceSum" and rank(node.inputs[0]) == 3 and axes in ([1], [-2]) and not keeps


def _replace(graph: ir.Graph, reshape: ir.Node) -> bool:
    if reshape.outputs[0].is_graph_output():
        return False
    tokens = dims(reshape.outputs[0])[1]
    rows = _Rows(graph, tokens).of(required(reshape.inputs[0]))
    reshape.outputs[0].replace_all_uses_with(rows)
    return True


class _Rows:
    """Computes hidden states [N, ..] as [1, N, ..]."""

    def __init__(self, graph: ir.Graph, tokens: Dim) -> None:
        self._graph, self._tokens = graph, tokens
        self._known = dict[ir.Value, ir.Value]()

    def of(self, value: ir.Value) -> ir.Value:
        if value not in self._known:
            node = value.producer()
            if node is None:  # an input of the graph
                self._graph.insert_before(self._graph[0], self._lift(value))
            elif _keeps_rows(node, added=-1) and dims(node.inputs[0])[1] == self._tokens:
                self._known[value] = required(node.inputs[0])
            elif _computes_rows(node):
                self._rebuild(node)
            else:
                graph_of(node).insert_after(node, self._lift(value))
        return self._known[value]

    def _shape(self, value: ir.Value) -> list[Dim]:
        return [1, self._tokens, *dims(value)[1:]]

    def _lift(self, value: ir.Value) -> ir.Node:
        """Returns the node that adds the first axis to what another node computes."""
        axis, types = integers(self._graph, "axis_0", [0]), [(value.dtype, self._shape(value))]
        lifted = new_node("Unsqueeze", [value, axis], name=f"{value.name}/rows", outputs=types)
        self._known[value] = lifted.outputs[0]
        return lifted

    def _rebuild(self, node: ir.Node) -> None:
        inputs = [value if value is None or value.is_initializer() else self.of(value) for value in node.inputs]
        attributes: dict[str, ir.Attr] = dict(node.attributes)
        if node.op_type == "Split":
            attributes["axis"] = ir.AttrInt64("axis", -1)
        if node.op_type == "Unsqueeze":
            axes = [axis + 1 for axis in numbers_of(node.inputs[1]) or []]
            inputs[1] = integers(self._graph, "_".join(["axis", *map(str, axes)]), axes)
        if node.op_type == "Slice":
            inputs[3] = integers(self._graph, "axis_m1", [-1])
        if node.op_type == "ReduceSum":
            inputs[1] = integers(self._graph, "axis_m2", [-2])
        types: Sequence = [(value.dtype, self._shape(value)) for value in node.outputs]
        new = new_node(node.op_type, inputs, attributes, name=f"{node.name}/rows", domain=node.domain, outputs=types)
        new.overload = node.overload
        new.metadata_props.update(node.metadata_props)
        graph_of(node).insert_before(node, new)
        self._known.update(zip(node.outputs, new.outputs, strict=True))
