"""Keeps new tokens on the second axis of hidden states, so that whole layers can be one operator.

Models swap tokens and channels around a convolution, or tokens and heads around a norm, or merge these, and write
Softplus in three operators. Each is undone where all nodes in between compute every row alike.
"""

import math
from abc import ABC, abstractmethod

import onnx_ir as ir

from tide_export.graph.rewriting import (
    SWAP_HEADS,
    Dim,
    dims,
    graph_of,
    integers,
    last_dim,
    new_node,
    nodes_of,
    number_of,
    op_before,
    producer,
    rank,
)

SWAP_CHANNELS = [0, 2, 1]
ELEMENTWISE = ("Sigmoid", "Softplus", "Exp", "Mul", "Add")
NORMS = ("RMSNormalization", "LayerNormalization")
LARGE = 20.0  # from there on Softplus(x) is x in float32


class TokenRowsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in nodes_of(model.graph, "Where"):
            modified |= _is_softplus(node) and _replace(node, node.inputs[2])
        for node in nodes_of(model.graph, "Clip"):
            modified |= _changes_nothing(node) and _replace(node, node.inputs[0])
        for swap in (SWAP_CHANNELS, SWAP_HEADS):
            turned = _Turned(swap)
            for node in nodes_of(model.graph, "Transpose"):
                modified |= _swaps(node, swap) and _replace(node, turned.of(node.inputs[0]))
        merged = _Merged(model.graph)
        for node in nodes_of(model.graph, "Reshape"):
            modified |= rank(node.inputs[0]) == 2 and _replace(node, merged.split(node))
        return ir.passes.PassResult(model, modified=modified)


class _Layout(ABC):
    """A layout that a model gives hidden states for some nodes; `of` computes these in the usual one."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._known = dict[ir.Value, ir.Value | None]()

    def of(self, value: ir.Value | None) -> ir.Value | None:
        """Returns `value` in the usual layout; None if a node before it does not compute all rows alike."""
        node = None if value is None else value.producer()
        if value is None or node is None or rank(value) != self._dimensions:
            return None
        if value not in self._known:
            self._known[value] = self.before(node)
            if self._known[value] is None and not node.domain and (attributes := self.attributes(node)) is not None:
                self._rebuild(node, attributes)
        return self._known[value]

    def _rebuild(self, node: ir.Node, attributes: dict[str, ir.Attr]) -> None:
        """Computes the outputs of `node` in the usual layout, if its inputs can be."""
        inputs = [each if each is None or each.is_initializer() else self.of(each) for each in node.inputs]
        if inputs.count(None) > list(node.inputs).count(None):
            return
        types = [(output.dtype, self.shape(dims(output), inputs)) for output in node.outputs]
        new = new_node(node.op_type, inputs, attributes, name=f"{node.name}/rows", outputs=types)
        graph_of(node).insert_before(node, new)
        self._known.update(zip(node.outputs, new.outputs, strict=True))

    @abstractmethod
    def before(self, node: ir.Node) -> ir.Value | None:
        """Returns what `node` brings into the layout."""

    @abstractmethod
    def attributes(self, node: ir.Node) -> dict[str, ir.Attr] | None:
        """Returns the attributes of `node` in the usual layout; None if it does not compute all rows alike."""

    @abstractmethod
    def shape(self, shape: list[Dim], inputs: list[ir.Value | None]) -> list[Dim]:
        """Returns the usual shape of an output of `shape` that is computed from `inputs`."""


class _Turned(_Layout):
    """States of which two axes are swapped."""

    def __init__(self, swap: list[int]) -> None:
        super().__init__(len(swap))
        self._swap, self._keeps_last = swap, swap[-1] == len(swap) - 1

    def before(self, node: ir.Node) -> ir.Value | None:
        return node.inputs[0] if _swaps(node, self._swap) else None

    def attributes(self, node: ir.Node) -> dict[str, ir.Attr] | None:
        if node.op_type == "Split":
            axis = self._swap[node.attributes.get_int("axis", 0)]
            return {**node.attributes, "axis": ir.AttrInt64("axis", axis)}
        axis, last = node.attributes.get_int("axis", -1), len(self._swap) - 1
        norm = node.op_type in NORMS and self._keeps_last and axis in (-1, last)
        alike = (norm or node.op_type in ELEMENTWISE) and _weights_have(node, 1 if self._keeps_last else 0)
        return dict(node.attributes) if alike else None

    def shape(self, shape: list[Dim], inputs: list[ir.Value | None]) -> list[Dim]:
        return [shape[axis] for axis in self._swap]


class _Merged(_Layout):
    """States [B N H, W] where [B, N, H, W] is usual."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__(2)
        self._graph = graph

    def split(self, node: ir.Node) -> ir.Value | None:
        """Returns the output [B, N, ..] of a Reshape of such hidden states, computed in the usual layout."""
        output, hidden = node.outputs[0], self.of(node.inputs[0])
        if (
            hidden is None
            or (rank(output) or 0) < 3
            or dims(output)[:2] != dims(hidden)[:2]
            or 0 in _integers(dims(output)[2:])
        ):
            return None
        return self._reshaped(node, hidden, dims(output))

    def before(self, node: ir.Node) -> ir.Value | None:
        hidden, merged = node.inputs[0], node.outputs[0]
        if node.op_type != "Reshape" or hidden is None or rank(merged) != 2 or (rank(hidden) or 0) < 3:
            return None
        numbers, width = math.prod(_integers(dims(hidden)[2:])), last_dim(merged)
        if width is None or not numbers or numbers % width:
            return None
        return self._reshaped(node, hidden, [*dims(hidden)[:2], numbers // width, width])

    def attributes(self, node: ir.Node) -> dict[str, ir.Attr] | None:
        norm = node.op_type in NORMS and node.attributes.get_int("axis", -1) in (-1, 1)
        if not (norm or node.op_type in ELEMENTWISE) or not _weights_have(node, 1):
            return None
        return {**node.attributes, "axis": ir.AttrInt64("axis", -1)} if norm else dict(node.attributes)

    def shape(self, shape: list[Dim], inputs: list[ir.Value | None]) -> list[Dim]:
        return next(dims(value) for value in inputs if rank(value) == 4)

    def _reshaped(self, node: ir.Node, hidden: ir.Value, shape: list[Dim]) -> ir.Value:
        target = integers(self._graph, "_".join(map(str, ("shape_0_0", *shape[2:]))), [0, 0, *_integers(shape[2:])])
        return op_before(node, "Reshape", [hidden, target], dtype=hidden.dtype, shape=shape, suffix="_rows")


def _integers(shape: list[Dim]) -> list[int]:
    """Returns dimensions, 0 for those that are unknown."""
    return [dim if isinstance(dim, int) else 0 for dim in shape]


def _swaps(node: ir.Node, swap: list[int]) -> bool:
    return node.op_type == "Transpose" and list(node.attributes.get_ints("perm", [])) == swap


def _weights_have(node: ir.Node, most: int) -> bool:
    """Whether no weight that the node reads has more dimensions."""
    return all((rank(value) or 0) <= most for value in node.inputs if value is not None and value.is_initializer())


def _is_softplus(node: ir.Node) -> bool:
    """Whether it is PyTorch's Softplus: above a threshold, x itself."""
    above, x, soft = node.inputs
    greater, softplus = producer(above, "Greater"), producer(soft, "Softplus")
    if greater is None or softplus is None or greater.inputs[0] is not x or softplus.inputs[0] is not x:
        return False
    threshold = number_of(greater.inputs[1])
    return threshold is not None and threshold >= LARGE


def _changes_nothing(node: ir.Node) -> bool:
    """Whether the bounds of a Clip hold for every Softplus."""
    low, high = (number_of(value) for value in [*node.inputs, None, None][1:3])
    return producer(node.inputs[0], "Softplus") is not None and low in (None, 0.0) and high in (None, math.inf)


def _replace(node: ir.Node, value: ir.Value | None) -> bool:
    if value is None or node.outputs[0].is_graph_output():
        return False
    node.outputs[0].replace_all_uses_with(value)
    return True
