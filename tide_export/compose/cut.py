"""Cuts the traced graph at its markers into pieces that can be put together in any way.

Stands between `trace` and `compose` (and, for targets with one network a segment, `lower`). A piece is an `ir.Graph`
with declared inputs and outputs; pieces share weights by name. Nothing is computed twice and nothing is lost: every
attention op of the trace ends up in exactly one segment, or the cut is refused.
"""

from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir
import onnx_ir.convenience as irc
from onnx_ir.passes import common as common_passes

from tide_export.compose.passes.masked_fills import MaskedFillsPass
from tide_export.compose.passes.rotary_tables import RotaryTablesPass
from tide_export.compose.passes.static_reshapes import StaticReshapesPass
from tide_export.errors import GraphError, TideError, UnsupportedModelError
from tide_export.names import DOMAIN, OP_ATTENTION
from tide_export.trace.tracer import TracedModel

BIAS = 4  # the input of TideAttention that holds its bias by key position, after query, key, value and sinks


@dataclass(frozen=True)
class Pieces:
    """A model taken apart. B is the batch, S the tokens at hand, D the hidden size, V the vocabulary.

    Attributes:
        boundaries: layers run where each segment starts, and the depth at the end: (0, checkpoints ..., depth).
        embed: input_ids, position_ids [B, S] -> hidden states [B, S, D].
        segments: hidden states [B, S, D], position_ids [B, S] -> hidden states, one per segment.
        tail: hidden states [B, S, D] -> normed states [B, S, D'] (final norm, projection).
        head: normed states [B, S, D'] -> logits [B, S, V].
        kv_shapes: (kv_heads, head_dim) of every layer.
        keys_values: where the trace has markers in front of all layers, for each of them hidden states [B, S, D],
            position_ids [B, S] -> key, value [B, kv_heads, S, head_dim] as its attention gets them; else empty.
    """

    boundaries: tuple[int, ...]
    embed: ir.Graph
    segments: tuple[ir.Graph, ...]
    tail: ir.Graph
    head: ir.Graph
    kv_shapes: tuple[tuple[int, int], ...]
    keys_values: tuple[ir.Graph, ...] = ()

    @property
    def hidden_size(self) -> int:
        return static_dim(self.embed.outputs[0], -1)

    @property
    def vocab_size(self) -> int:
        return static_dim(self.head.outputs[0], -1)


def cut(traced: TracedModel, max_length: int) -> Pieces:
    """Cuts `traced`; `max_length` is the longest sequence the graphs will see (it sizes the rotary tables).

    Raises:
        UnsupportedModelError: a layer reads more than the hidden states and positions in front of it.
        GraphError: the trace was made for shorter sequences.
    """
    for table in (bias_table(node) for node in traced.model.graph if is_attention(node)):
        if table is not None and static_dim(table, 1) < max_length:
            raise GraphError(f"the trace holds attention biases for {static_dim(table, 1)} tokens, not {max_length}")
    rewrites = ir.passes.Sequential(
        common_passes.CommonSubexpressionEliminationPass(),
        StaticReshapesPass(),
        MaskedFillsPass(),
        RotaryTablesPass(max_length),
        common_passes.RemoveUnusedNodesPass(),
    )
    try:
        graph = rewrites(traced.model).model.graph
    except ir.passes.PassError as error:
        if isinstance(error.__cause__, TideError):
            raise error.__cause__ from None
        raise
    token_ids, positions = graph.inputs
    bounds = traced.boundaries

    def entry(layer: int) -> ir.Value:
        return traced.marker(layer).outputs[0]

    def leave(layer: int) -> ir.Value:
        value = traced.marker(layer).inputs[0]
        assert value is not None
        return value

    keys_values: list[ir.Graph] = []
    if traced.every_layer:
        attention = {_layer(node): node for node in graph if is_attention(node)}
        keys_values = [_keys_and_values(graph, entry(layer), attention[layer]) for layer in range(bounds[-1])]
        _remove_markers(traced)

    segments = []
    for start, stop in pairwise(bounds):
        piece = irc.extract(graph, [entry(start), positions, token_ids], [leave(stop)])
        _shapes_from_hidden_states(piece)
        layers = [_layer(node) for node in piece if is_attention(node)]
        if layers != list(range(start, stop)):
            raise UnsupportedModelError(
                f"the segment of layers {start}..{stop - 1} also needs values computed elsewhere in the model "
                f"(it would run the attention of layers {layers}), so the model cannot be cut there"
            )
        segments.append(piece)
    try:
        tail = irc.extract(graph, [entry(bounds[-1])], [leave(traced.head_marker)])
        head = irc.extract(graph, [entry(traced.head_marker)], [graph.outputs[0]])
    except ValueError as error:
        raise UnsupportedModelError(
            f"the final norm or head reads more than the last layer's hidden states: {error}"
        ) from error
    embed = irc.extract(graph, [token_ids, positions], [leave(0)])
    kv_shapes = tuple(
        (node.attributes["kv_num_heads"].as_int(), node.attributes["head_dim"].as_int())
        for node in graph
        if is_attention(node)
    )
    return Pieces(bounds, embed, tuple(segments), tail, head, kv_shapes, tuple(keys_values))


def _keys_and_values(graph: ir.Graph, entry: ir.Value, attention: ir.Node) -> ir.Graph:
    """From the states in front of a layer to the key and value its attention gets."""
    token_ids, positions = graph.inputs
    key, value = attention.inputs[1:3]
    assert key is not None
    assert value is not None
    try:
        piece = irc.extract(graph, [entry, positions, token_ids], [key, value])
    except ValueError as error:
        raise UnsupportedModelError(
            f"the keys and values of layer {_layer(attention)} need more than the hidden states in front of it, so "
            "they cannot be propagated past skipped layers"
        ) from error
    _shapes_from_hidden_states(piece)
    return piece


def _remove_markers(traced: TracedModel) -> None:
    """Takes out the markers between which nothing is cut."""
    for layer in set(range(traced.boundaries[-1])) - set(traced.boundaries):
        marker = traced.marker(layer)
        (before,) = marker.inputs
        assert before is not None
        marker.outputs[0].replace_all_uses_with(before)
        traced.model.graph.remove(marker, safe=True)


def bias_table(attention: ir.Node) -> ir.Value | None:
    """The bias of a traced TideAttention by head and key position, float32 [H, N]; None where it has none."""
    return attention.inputs[BIAS] if len(attention.inputs) > BIAS else None


def static_dim(value: ir.Value, axis: int) -> int:
    """A dimension that must be known, or GraphError."""
    dim = value.shape[axis] if value.shape is not None else None
    if not isinstance(dim, int):
        raise GraphError(f"the trace lost the size of dimension {axis} of {value.name}")
    return dim


def _shapes_from_hidden_states(piece: ir.Graph) -> None:
    """Shapes a segment reads off input_ids or position_ids [B, S] are read off its hidden states [B, S, D] instead."""
    hidden, positions, token_ids = piece.inputs
    for source in (token_ids, positions):
        for node, index in list(source.uses()):
            if node.op_type == "Shape" and node.attributes.get_int("end", 2) in (1, 2):
                node.attributes["end"] = ir.AttrInt64("end", node.attributes.get_int("end", 2))
                node.replace_input_with(index, hidden)
    if token_ids.uses():
        raise UnsupportedModelError(
            f"a layer behind a checkpoint reads the token ids ({next(iter(token_ids.uses())).node.op_type}), "
            "so the model cannot be cut there"
        )
    del piece.inputs[2]


def is_attention(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, OP_ATTENTION)


def _layer(node: ir.Node) -> int:
    return node.attributes["layer"].as_int()
