"""Cuts the traced graph at its markers into pieces, from which any of the graphs is composed.

A piece is an `ir.Graph` with declared inputs and outputs; pieces share weights by name. Every attention op of the trace
ends up in exactly one segment, or the cut is refused.

What crosses a cut is what each token *carries*: its hidden states, and what later layers read that follows from its id
alone (per-layer embeddings). So what is kept of pending tokens holds all that later segments need, and only segment 0
reads token ids. Layers that attend to an earlier layer's keys and values (`kv_layers`) read that layer's K/V cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir
import onnx_ir.convenience as irc
from onnx_ir.passes import common as common_passes

from tide_export.bundle.model_info import LoraInfo, StateInfo
from tide_export.compose.lora import lora_of
from tide_export.compose.passes.carried_values import TAPPED, CarriedValuesPass, uncarried
from tide_export.compose.passes.counted_positions import CountedPositionsPass
from tide_export.compose.passes.masked_fills import MaskedFillsPass
from tide_export.compose.passes.norms import NormsPass
from tide_export.compose.passes.rotary_tables import RotaryTablesPass
from tide_export.compose.passes.shared_keys import KV_LAYER, SharedKeysPass
from tide_export.compose.passes.split_rotations import SplitRotationsPass
from tide_export.compose.passes.static_reshapes import StaticReshapesPass
from tide_export.compose.states import keeps_state, shapes_of
from tide_export.errors import GraphError, UnsupportedModelError
from tide_export.graph.rewriting import FLOAT, dims, new_node, nodes_of, op_before, required, run_passes, static_dim
from tide_export.names.operators import DOMAIN, OP_ATTENTION
from tide_export.trace.tracer import TracedModel

NO_KV = (0, 0)  # shape of the K/V of a layer without attention
_NORMS = ("RMSNormalization", "LayerNormalization")
_SELECTIONS = ("Gather", "Slice", "Split", "GatherElements", "GatherND")


@dataclass(frozen=True)
class Pieces:
    """Holds the parts of a model as graphs.

    B is the batch, S the number of tokens, D the hidden size, W >= D the width of what is carried between segments, V
    the vocabulary.

    Attributes:
        boundaries: layers run where each segment starts, and the depth at the end: (0, checkpoints ..., depth).
        embed: input_ids, position_ids [B, S] -> hidden states before segment 0, which may be wider than W.
        segments: hidden [B, S, W], position_ids [B, S] -> hidden [B, S, W], one per segment; the last gives hidden
            states [B, S, D], and after these what a draft head reads, if it reads hidden states of several layers: all
            of them side by side, which is carried between segments too.
        final_norm: hidden states [B, S, D] -> normalized [B, S, D'] (final norm, projection).
        head: normalized hidden states [B, S, D'] -> logits [B, S, V].
        kv_shapes: (kv_heads, head_dim) of the keys and values that every attention reads; (0, 0) where there is none.
            The first attentions of all layers come first, then the second ones, and so on.
        kv_layers: the attention whose keys and values every attention reads: itself, or an earlier one.
        states: recurrent states of layers, by layer.
        lora: the room for low-rank adapters; None: there is none.
        exit_shares: whether the last column of the states after a segment is its router's score (`exit_shares`).
    """

    boundaries: tuple[int, ...]
    embed: ir.Graph
    segments: tuple[ir.Graph, ...]
    final_norm: ir.Graph
    head: ir.Graph
    kv_shapes: tuple[tuple[int, int], ...]
    kv_layers: tuple[int, ...]
    states: tuple[StateInfo, ...] = ()
    lora: LoraInfo | None = None
    exit_shares: bool = False

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden states, which lenses and the final norm read."""
        return static_dim(self.final_norm.inputs[0], -1)

    @property
    def carried_size(self) -> int:
        """Width W of what is passed from one segment to the next, and pending."""
        return static_dim(self.segments[0].outputs[0], -1)

    def kv_read(self, k: int) -> list[int]:
        """Attentions whose K/V cache segment k reads, ascending: its own and those of earlier layers."""
        depth, layers = self.boundaries[-1], range(self.boundaries[k], self.boundaries[k + 1])
        shapes = enumerate(self.kv_shapes)
        return sorted({self.kv_layers[i] for i, shape in shapes if i % depth in layers and shape != NO_KV})

    def kv_written(self, k: int) -> list[int]:
        """Attentions of segment k with K/V of their own, ascending."""
        return [i for i in self.kv_read(k) if i % self.boundaries[-1] >= self.boundaries[k]]

    @property
    def kv_caches(self) -> list[int]:
        """Attentions with K/V of their own, segment by segment."""
        return [layer for k in range(len(self.segments)) for layer in self.kv_written(k)]

    def states_in(self, k: int) -> list[StateInfo]:
        """Returns the recurrent states of segment k's layers."""
        return [one for one in self.states if self.boundaries[k] <= one.layer < self.boundaries[k + 1]]

    @property
    def normalized_size(self) -> int:
        """Width D' of what routers and head read."""
        return static_dim(self.final_norm.outputs[0], -1)

    @property
    def vocab_size(self) -> int:
        return static_dim(self.head.outputs[0], -1)

    @property
    def norm_alone(self) -> bool:
        """Whether the final norm is one operator, which can be fused with the residual addition before it."""
        nodes = list(self.final_norm)
        return len(nodes) == 1 and nodes[0].op_type in _NORMS and nodes[0].inputs[0] is self.final_norm.inputs[0]


def cut(traced: TracedModel, max_length: int, taps: Sequence[int] = ()) -> Pieces:
    """Cuts `traced`.

    Args:
        max_length: the longest sequence the graphs will run on (it sizes the rotary tables).
        taps: layers run, 1 .. depth, after each of which a draft head reads the hidden states, in its order; the trace
            then has a marker before every layer.

    Raises:
        UnsupportedModelError: a layer reads more than the hidden states and positions before it.
        GraphError: the trace was made for shorter sequences.
    """
    try:
        return _cut(traced, max_length, taps)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{traced.architecture}: {error}") from error


def counts_positions(pieces: Pieces) -> bool:
    """Whether the model takes one token's position and counts on from there."""
    return any(index == 0 and node.op_type in _SELECTIONS for node, index in _uses_of_positions(pieces))


def check_positions(pieces: Pieces) -> None:
    """Checks that the sequences of a batch can be rows of one tensor.

    Raises:
        UnsupportedModelError: positions are counted, or shared (Llama 4's query scaling counts tokens itself).
    """
    if counts_positions(pieces):
        raise UnsupportedModelError("it takes one token's position and counts on from there")
    if any(node.op_type == "Squeeze" for node, _ in _uses_of_positions(pieces)):
        raise UnsupportedModelError("it numbers the tokens of all sequences of a batch alike")


def _uses_of_positions(pieces: Pieces) -> list[tuple[ir.Node, int]]:
    return [(use.node, use.idx) for piece in (pieces.embed, *pieces.segments) for use in piece.inputs[1].uses()]


def is_attention(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, OP_ATTENTION)


def number_of(node: ir.Node) -> int:
    """Returns an attention's number: its layer, plus the depth for each attention before it in the layer."""
    return node.attributes["layer"].as_int()


def attention_inputs(attention: ir.Node) -> list[ir.Value | None]:
    """Query, key, value, sinks, bias and bias by distance of a TideAttention; None where it has none."""
    return [*attention.inputs, None, None, None, None, None][:6]


def sinks_and_bias(attention: ir.Node) -> list[ir.Value | None]:
    """Returns the sinks [H] and the bias by head and key position [H, N] of a traced TideAttention.

    Both are float32, None if absent.
    """
    return attention_inputs(attention)[3:5]


def _cut(traced: TracedModel, max_length: int, taps: Sequence[int]) -> Pieces:
    graph, bounds = traced.model.graph, traced.boundaries
    if taps:
        graph.outputs.append(_tapped(traced, taps))
    attention = {number_of(node): node for node in graph if is_attention(node)}
    for _, table in map(sinks_and_bias, attention.values()):
        if table is not None and static_dim(table, 1) < max_length:
            raise GraphError(f"the trace holds attention biases for {static_dim(table, 1)} tokens, not {max_length}")
    run_passes(
        traced.model,
        common_passes.CommonSubexpressionEliminationPass(),
        StaticReshapesPass(),
        MaskedFillsPass(),
        CountedPositionsPass(),
        SplitRotationsPass(),
        NormsPass(),
        RotaryTablesPass(max_length),
        SharedKeysPass(),
        CarriedValuesPass(bounds),
        common_passes.RemoveUnusedNodesPass(),
    )
    if nodes_of(graph, "NonZero"):
        raise UnsupportedModelError("it decides by the values of tensors what to compute, so it cannot be exported")
    token_ids, positions = graph.inputs

    def after(layer: int) -> ir.Value:
        return traced.marker(layer).outputs[0]

    def before(layer: int) -> ir.Value:
        return required(traced.marker(layer).inputs[0])

    depth, recurrent = bounds[-1], [node for node in graph if keeps_state(node)]
    own = {i: i for i in range(-(-(max(attention, default=0) + 1) // depth) * depth)}
    kv_layers = tuple((own | {i: node.attributes.get_int(KV_LAYER, i) for i, node in attention.items()}).values())
    if traced.every_layer:
        _remove_inner_markers(traced)

    segments = []
    for start, stop in pairwise(bounds):
        outputs = [before(stop), *(graph.outputs[1:] if stop == depth else ())]
        piece = irc.extract(graph, [after(start), positions, token_ids], outputs)
        _shapes_from_hidden_states(piece)
        layers = [number_of(node) % depth for node in piece if is_attention(node) or keeps_state(node)]
        every = [number_of(node) % depth for node in (*attention.values(), *recurrent)]
        expected = [layer for layer in every if start <= layer < stop]
        if sorted(layers) != sorted(expected):
            raise UnsupportedModelError(
                f"the segment of layers {start}..{stop - 1} also needs values computed elsewhere in the model "
                f"(it would run the attention of layers {layers}), so the model cannot be cut there"
            )
        segments.append(piece)
    try:
        final_norm = irc.extract(graph, [after(bounds[-1])], [before(traced.head_marker)])
        head = irc.extract(graph, [after(traced.head_marker)], [graph.outputs[0]])
    except ValueError as error:
        raise UnsupportedModelError(
            f"the final norm or head reads more than the last layer's hidden states: {error}"
        ) from error
    embed = irc.extract(graph, [token_ids, positions], [before(0)])
    kv_shapes = [NO_KV] * len(own)
    for i, node in attention.items():
        kv_shapes[i] = (node.attributes["kv_num_heads"].as_int(), node.attributes["head_dim"].as_int())
    return Pieces(
        bounds,
        embed,
        tuple(segments),
        final_norm,
        head,
        tuple(kv_shapes),
        kv_layers,
        shapes_of(recurrent),
        lora_of([node for piece in segments for node in piece]),
    )


def _tapped(traced: TracedModel, taps: Sequence[int]) -> ir.Value:
    """Adds the hidden states after so many layers, side by side, for `CarriedValuesPass` to carry."""
    hidden = []
    for layer in taps:
        marker = traced.marker(layer)
        one = required(marker.inputs[0]) if layer == traced.boundaries[-1] else marker.outputs[0]
        if layer < traced.boundaries[-1]:  # a value of its own: what is marked may be given more to carry
            copy = new_node("Identity", [one], name=f"{TAPPED}/{layer}", outputs=[(FLOAT, one.shape)])
            traced.model.graph.insert_after(marker, copy)
            one = copy.outputs[0]
        hidden.append(one)
    shape = [*dims(hidden[0])[:2], sum(static_dim(one, -1) for one in hidden)]
    last = traced.marker(traced.boundaries[-1])
    joined = op_before(last, "Concat", hidden, {"axis": -1}, dtype=FLOAT, shape=shape)
    required(joined.producer()).name = TAPPED
    return joined


def _remove_inner_markers(traced: TracedModel) -> None:
    """Removes the markers within segments."""
    for layer in set(range(traced.boundaries[-1])) - set(traced.boundaries):
        marker = traced.marker(layer)
        for after, before in uncarried(marker).items():
            after.replace_all_uses_with(before)
    run_passes(traced.model, common_passes.RemoveUnusedNodesPass())


def _shapes_from_hidden_states(piece: ir.Graph) -> None:
    """Makes a piece read shapes off its hidden states [B, S, W], not input_ids or position_ids [B, S]."""
    hidden, positions, token_ids = piece.inputs
    for source in (token_ids, positions):
        for node, index in list(source.uses()):
            if node.op_type == "Shape" and node.attributes.get_int("end", 2) in (1, 2):
                node.attributes["end"] = ir.AttrInt64("end", node.attributes.get_int("end", 2))
                node.replace_input_with(index, hidden)
    if token_ids.uses():
        raise UnsupportedModelError(
            f"a layer after a checkpoint reads the token ids ({next(iter(token_ids.uses())).node.op_type}), "
            "so the model cannot be cut there"
        )
    del piece.inputs[2]
