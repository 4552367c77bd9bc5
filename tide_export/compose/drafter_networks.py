"""Composes the network of a drafter around its pieces: rows of several sequences, with K/V of its own.

`compose_drafter` keeps K/V in pages, for ONNX Runtime: it runs the rows of several sequences at once, as the networks
of a batch do, and what follows attention is computed for `last_tokens` alone. `compose_drafter_segment` keeps them in
buffers of a fixed length, as the segment networks do that TensorRT builds plans of.

Matrices are symbolic, by name, as those of a quantized model: a draft costs the bytes that it reads, and what rounding
changes are drafts, never tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tide_export.compose import kv_cache, segments
from tide_export.compose.cut import is_attention, number_of
from tide_export.compose.kv_cache import attend_from_cache, page_inputs, page_outputs, past_buffers, present_outputs
from tide_export.compose.passes.shared_keys import KV_LAYER
from tide_export.compose.segments import BATCH, KEYS, TOKENS
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT32, INT64, last_dim, new_node, required, static_dim, typed_value
from tide_export.names import paged_drafter, segment_drafter
from tide_export.names.networks import DRAFTER
from tide_export.names.operators import DOMAIN, OP_ATTENTION
from tide_export.names.segment_networks import KEY_INDICES

EMBEDDINGS = "embeddings"  # input: float32 [1, N, E], for `INPUT_IDS` where the bundle's embedding is put before it
ROWS, LAST = "rows", "last"


@dataclass(frozen=True, eq=False)
class DrafterPieces:
    """Holds a drafter as graphs.

    B sequences, S rows of each of which m draft, E and D the widths of embeddings and hidden states.

    Attributes:
        attend: embeddings [B, S, E], hidden [B, S, D], position_ids [B, S] -> one or more values [B, S, W]; it holds
            one TideAttention, of layer 0, or several that read the model's K/V.
        propose: these values [B, m, W] -> logits [B, m, n], next hidden states [B, m, D].
        kv_shape: (kv_heads, head_dim) of its keys and values, or of the first that it reads.
        tokens: ids that it can propose, ascending, int64 [n].
        acceptance: share of its drafts that are accepted by confidence, at CONFIDENCES' intervals.
        matrices: float32 [out, in], by the names that TideQuantizedMatMul nodes have.
        max_tokens: rows of a sequence that it is made for, at most.
        layers: of the model, after which it reads hidden states; none: it reads the model's final state.
        shared_kv: layers of the model whose keys and values it reads, with their shapes; none: it has its own.
        num_layers: that have keys and values of their own.
        block_size: tokens of a block, of which it drafts all but the first in one run; 0: it drafts one token. Then
            `attend` takes the last row of each sequence [1, R] too and gives logits [R, block_size - 1, n], its
            attentions have queries of a block's tokens side by side, and there is no `propose`.
    """

    attend: ir.Graph
    propose: ir.Graph | None
    kv_shape: tuple[int, int]
    tokens: NDArray[np.int64]
    acceptance: tuple[float, ...]
    matrices: Mapping[str, NDArray[np.float32]]
    max_tokens: int
    layers: tuple[int, ...] = ()
    shared_kv: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    num_layers: int = 1
    block_size: int = 0

    @property
    def embedding_size(self) -> int:
        return static_dim(self.attend.inputs[0], -1)

    @property
    def hidden_size(self) -> int:
        return static_dim(self.attend.inputs[1], -1)


def compose_drafter(pieces: DrafterPieces) -> ir.Model:
    """Composes the network with K/V in pages, its own or the model's.

    Its first input is EMBEDDINGS; `names.paged_drafter` has its other tensors.
    """
    builder = GraphBuilder("drafter", Weights())
    embeddings = typed_value(EMBEDDINGS, FLOAT, [1, ROWS, pieces.embedding_size])
    hidden = typed_value(paged_drafter.HIDDEN_STATES, FLOAT, [1, ROWS, pieces.hidden_size])
    positions = typed_value(paged_drafter.POSITION_IDS, INT64, [1, ROWS])
    last = typed_value(paged_drafter.LAST_TOKENS, INT64, [LAST])
    places = [
        typed_value(paged_drafter.PAGE_TABLE, INT32, ["sequences", "table"]),
        typed_value(paged_drafter.SEQUENCE_LENGTHS, INT64, ["sequences"]),
        typed_value(paged_drafter.SEQUENCE_STARTS, INT64, ["starts"]),
    ]
    kv_shapes = pieces.shared_kv or dict.fromkeys(range(pieces.num_layers), pieces.kv_shape)
    pages = page_inputs(kv_shapes, kv_shapes)
    inputs = [embeddings, hidden, positions, last, *places, *pages.values()]
    axis = builder.weights.integers("axis_0", [0])
    if pieces.propose is None:
        rows = builder.op("Unsqueeze", [last, axis], dtype=INT64, shape=[1, LAST])
        (logits,) = builder.inline(pieces.attend, [embeddings, hidden, positions, rows], 1, ROWS)
        logits.shape = ir.Shape([LAST, pieces.block_size - 1, len(pieces.tokens)])
        written = page_outputs(_attend_as_blocks(builder, pages, places))
        return builder.model("tide_drafter", inputs, {paged_drafter.LOGITS: logits} | written)
    attended = builder.inline(pieces.attend, [embeddings, hidden, positions], 1, ROWS)
    written = page_outputs(attend_from_cache(builder.nodes, pages, places))
    chosen = [
        builder.op("Gather", [value, last], {"axis": 1}, dtype=FLOAT, shape=[1, LAST, last_dim(value)])
        for value in attended
    ]
    proposed = [
        builder.op("Squeeze", [value, axis], dtype=FLOAT, shape=[LAST, last_dim(value)])
        for value in builder.inline(pieces.propose, chosen, 1, LAST)
    ]
    outputs = dict(zip((paged_drafter.LOGITS, paged_drafter.NEW_HIDDEN_STATES), proposed, strict=True)) | written
    return builder.model("tide_drafter", inputs, outputs)


def _attend_as_blocks(builder: GraphBuilder, pages: kv_cache.Cache, places: list[ir.Value]) -> kv_cache.Cache:
    """Makes each attention two: one stores keys and values of all rows, one attends for the blocks.

    A block's tokens are heads of one token, the last, and so all see the whole block.
    """
    size = builder.op("Size", [places[2]], dtype=INT64, shape=[])
    ends = [builder.weights.integers(f"number_{number}", number) for number in (0, 1)]
    starts = builder.op("Range", [ends[0], size, ends[1]], dtype=INT64, shape=["starts"])
    made, builder.nodes[:] = builder.nodes[:-2], builder.nodes[-2:]
    written: kv_cache.Cache = {}
    for node in made:
        if not is_attention(node):
            builder.nodes.append(node)
            continue
        _, key, value, *_ = node.inputs
        heads = ir.AttrInt64("num_heads", node.attributes["kv_num_heads"].as_int())
        attributes, name = dict(node.attributes) | {"num_heads": heads}, f"{node.name}/stored"
        taken, made_of = [key, key, value], [(FLOAT, None)]
        store = new_node(OP_ATTENTION, taken, attributes, name=name, domain=DOMAIN, outputs=made_of)
        stored = attend_from_cache([store], pages, places)
        written |= stored
        node.attributes[KV_LAYER] = ir.AttrInt64(KV_LAYER, number_of(node))
        node.replace_input_with(1, None)
        node.replace_input_with(2, None)
        builder.nodes += [store, node]
        attend_from_cache([node], stored, [*places[:2], starts])
    return written


def compose_drafter_segment(pieces: DrafterPieces) -> ir.Model:
    """Composes the network with K/V in buffers of `max_tokens` rows.

    Its first input is EMBEDDINGS [B, S, E].
    """
    builder = GraphBuilder(DRAFTER, Weights())
    capacity = pieces.max_tokens
    embeddings = typed_value(EMBEDDINGS, FLOAT, [BATCH, TOKENS, pieces.embedding_size])
    hidden = typed_value(segment_drafter.HIDDEN_STATES, FLOAT, [BATCH, TOKENS, pieces.hidden_size])
    indices = typed_value(segment_drafter.TOKEN_INDICES, INT64, [TOKENS])
    lengths = typed_value(segment_drafter.PAST_LENGTHS, INT64, [BATCH])
    last = typed_value(segment_drafter.LAST_TOKENS, INT64, [BATCH])
    past = past_buffers([0], [pieces.kv_shape], BATCH, capacity)
    positions = segments.positions_of(builder, lengths, indices, capacity)
    start = len(builder.nodes)
    attended = builder.inline(pieces.attend, [embeddings, hidden, positions], BATCH, TOKENS)
    keys = typed_value(KEY_INDICES, INT64, [KEYS])
    written = present_outputs(attend_from_cache(builder.nodes[start:], past, [lengths, positions, keys]))
    at = builder.op("Unsqueeze", [last, builder.weights.integers("axis_1", [1])], dtype=INT64, shape=[BATCH, 1])
    proposed = builder.inline(required(pieces.propose), [_row(builder, value, at) for value in attended], BATCH, 1)
    outputs = dict(zip((segment_drafter.LOGITS, segment_drafter.NEW_HIDDEN_STATES), proposed, strict=True))
    inputs = [embeddings, hidden, indices, keys, lengths, last, *past.values()]
    return builder.model(DRAFTER, inputs, outputs | written, (), segments.OPSET, segments.IR_VERSION)


def _row(builder: GraphBuilder, value: ir.Value, at: ir.Value) -> ir.Value:
    """Gathers the row `at` [B, 1] of each sequence of `value` [B, S, W]: returns [B, 1, W]."""
    width = last_dim(value)
    row = builder.op("GatherND", [value, at], {"batch_dims": 1}, dtype=FLOAT, shape=[BATCH, width])
    return builder.op("Unsqueeze", [row, builder.weights.integers("axis_1", [1])], dtype=FLOAT, shape=[BATCH, 1, width])
