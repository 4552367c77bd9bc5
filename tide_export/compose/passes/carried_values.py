"""Adds to each token's hidden states whatever else later layers read of the token.

So only segment 0 reads token ids, and no segment what an earlier one computed. Hidden states have one width at all
checkpoints: where less is read, zeros follow.

Runs on the trace before it is cut. A layer may read values that follow from the token ids alone, such as its slice of a
second embedding, or that an earlier layer computed beside its hidden states, such as a router's. Neither is there
when a later segment runs on pending tokens, so these values are concatenated to the hidden states before the markers
and split off after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tide_export.compose.states import keeps_state
from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import FLOAT, dims, integers, new_node, nodes_of, op_before, rank, required, static_dim
from tide_export.names.operators import DOMAIN, OP_MARKER

TAPPED = "tapped"  # names the node that gives what a draft head reads, in the last segment whatever that is


class CarriedValuesPass(ir.passes.InPlacePass):
    """Runs after `SharedKeysPass`, so that attention reads no value of an earlier segment."""

    def __init__(self, boundaries: Sequence[int]):
        """`boundaries`: layers run at the markers between segments, and the depth at the end."""
        super().__init__()
        self.first, *self.checkpoints, self.depth = boundaries

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises UnsupportedModelError where such a value is no vector of numbers."""
        reads = _reads(model.graph, self.depth)
        widths = {layer: sum(map(_width, self._carried(reads, layer))) for layer in self.checkpoints}
        current = {read.value: read.value for read in reads}  # each value as it was split off last
        for marker in nodes_of(model.graph, OP_MARKER, DOMAIN) if reads else ():
            layer = marker.attributes["layer"].as_int()
            carried = self._carried(reads, layer)
            missing = max(widths.values()) - widths[layer] if layer in widths else 0
            if (carried or missing) and layer < self.depth:
                after = _carry(model.graph, marker, [current[value] for value in carried], missing)
                current |= dict(zip(carried, after, strict=True))
            for read in reads:
                if read.layer == layer:
                    read.node.replace_input_with(read.index, current[read.value])
        if reads:
            model.graph.sort()  # what is carried from the embedding on may have been computed later
        return ir.passes.PassResult(model, modified=bool(reads))

    def _carried(self, reads: Sequence["_Read"], layer: int) -> list[ir.Value]:
        """Returns the values that the marker `layer` carries.

        Those of token ids are carried on to the last checkpoint: their hidden states need no zeros.
        """

        def carries(read: _Read) -> bool:
            if read.since is not None:
                return read.since < layer <= read.layer
            return layer == self.first or (bool(self.checkpoints) and read.layer >= self.checkpoints[0])

        return list(dict.fromkeys(read.value for read in reads if carries(read)))


def uncarried(marker: ir.Node) -> dict[ir.Value, ir.Value]:
    """Maps each value that the graph reads after `marker` to the value before it.

    The marker can then be removed.
    """
    before, after = required(marker.inputs[0]), marker.outputs[0]
    concat, split = before.producer(), next((use.node for use in after.uses() if use.node.op_type == "Split"), None)
    if concat is not None and concat.op_type == "Pad":
        concat = required(concat.inputs[0]).producer()
    if concat is None or split is None or concat.op_type != "Concat":
        return {after: before}
    return {after: before} | dict(zip(split.outputs, map(required, concat.inputs), strict=False))


@dataclass(frozen=True)
class _Read:
    """Names a node's input after the marker `layer` that does not come from the hidden states there.

    It follows from the token ids alone, or was computed after the marker `since`.
    """

    node: ir.Node
    index: int
    value: ir.Value
    layer: int
    since: int | None = None


def _reads(graph: ir.Graph, depth: int) -> list[_Read]:
    token_ids = graph.inputs[0]
    markers = [node.attributes["layer"].as_int() for node in nodes_of(graph, OP_MARKER, DOMAIN)]
    from_ids, layers = {token_ids}, dict[ir.Value, int]()  # values after a marker, with the last marker before them
    reads = []
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if (node.domain, node.op_type) == (DOMAIN, OP_MARKER):
            layers[node.outputs[0]] = node.attributes["layer"].as_int()
            continue
        layer = max((layers[value] for value in inputs if value in layers), default=None)
        if keeps_state(node):  # in its layer, whatever it reads
            layer = max(marker for marker in markers if marker <= node.attributes["layer"].as_int())
        if node.name == TAPPED:
            layer = max(marker for marker in markers if marker < depth)
        if layer is None:
            if node.op_type != "Shape" and not from_ids.isdisjoint(inputs):
                from_ids.update(node.outputs)
            continue
        if node.op_type != "Shape":
            layers |= dict.fromkeys(node.outputs, layer)
        for index, value in enumerate(node.inputs):
            if value is None or layer >= depth:
                continue
            vectors = rank(value) == 3 and value.dtype == FLOAT and dims(value)[:2] == dims(token_ids)
            if value in from_ids and not vectors:
                raise UnsupportedModelError(
                    f"a layer after a checkpoint reads the token ids ({node.op_type}), so the model cannot be cut there"
                )
            if value in from_ids:
                reads.append(_Read(node, index, value, layer))
            elif layers.get(value, layer) < layer and vectors:
                reads.append(_Read(node, index, value, layer, layers[value]))
    return reads


def _width(value: ir.Value) -> int:
    return static_dim(value, -1)


def _carry(graph: ir.Graph, marker: ir.Node, carried: Sequence[ir.Value], missing: int) -> Sequence[ir.Value]:
    """Makes `marker` mark hidden states and `carried` values, and after these `missing` zeros.

    Returns these values as they are split off after it.
    """
    hidden, marked = required(marker.inputs[0]), marker.outputs[0]
    batch, tokens, _ = dims(hidden)
    widths = [*map(_width, (hidden, *carried))]
    shape = [batch, tokens, sum(widths)]
    joined = op_before(marker, "Concat", [hidden, *carried], {"axis": -1}, dtype=FLOAT, shape=shape)
    if missing:
        widths, shape = [*widths, missing], [batch, tokens, sum(widths) + missing]
        pads = integers(graph, f"state_pads_{missing}", [0, 0, 0, 0, 0, missing])
        joined = op_before(marker, "Pad", [joined, pads], dtype=FLOAT, shape=shape)
    sizes = integers(graph, f"state_sizes_{'_'.join(map(str, widths))}", widths)
    types = [(FLOAT, [batch, tokens, width]) for width in widths]
    split = new_node("Split", [marked, sizes], {"axis": -1}, name=f"{marker.name}/Split", outputs=types)
    graph.insert_after(marker, split)
    marked.replace_all_uses_with(split.outputs[0])
    split.replace_input_with(0, marked)
    marker.replace_input_with(0, joined)
    marked.shape = ir.Shape(shape)
    return split.outputs[1 : 1 + len(carried)]
