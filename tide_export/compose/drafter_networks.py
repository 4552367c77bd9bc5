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

from tide_export.compose import segments
from tide_export.compose.kv_cache import attend_from_cache, page_inputs, page_outputs, past_buffers, present_outputs
from tide_export.compose.segments import BATCH, KEYS, TOKENS
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT32, INT64, last_dim, static_dim, typed_value
from tide_export.names import paged_drafter, segment_drafter
from tide_export.names.networks import DRAFTER
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
    """

    attend: ir.Graph
    propose: ir.Graph
    kv_shape: tuple[int, int]
    tokens: NDArray[np.int64]
    acceptance: tuple[float, ...]
    matrices: Mapping[str, NDArray[np.float32]]
    max_tokens: int
    layers: tuple[int, ...] = ()
    shared_kv: Mapping[int, tuple[int, int]] = field(default_factory=dict)

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
    kv_shapes = pieces.shared_kv or {0: pieces.kv_shape}
    pages = page_inputs(kv_shapes, kv_shapes)
    attended = builder.inline(pieces.attend, [embeddings, hidden, positions], 1, ROWS)
    written = page_outputs(attend_from_cache(builder.nodes, pages, places))
    chosen = [
        builder.op("Gather", [value, last], {"axis": 1}, dtype=FLOAT, shape=[1, LAST, last_dim(value)])
        for value in attended
    ]
    axis = builder.weights.integers("axis_0", [0])
    proposed = [
        builder.op("Squeeze", [value, axis], dtype=FLOAT, shape=[LAST, last_dim(value)])
        for value in builder.inline(pieces.propose, chosen, 1, LAST)
    ]
    outputs = dict(zip((paged_drafter.LOGITS, paged_drafter.NEW_HIDDEN_STATES), proposed, strict=True)) | written
    inputs = [embeddings, hidden, positions, last, *places, *pages.values()]
    return builder.model("tide_drafter", inputs, outputs)


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
    proposed = builder.inline(pieces.propose, [_row(builder, value, at) for value in attended], BATCH, 1)
    outputs = dict(zip((segment_drafter.LOGITS, segment_drafter.NEW_HIDDEN_STATES), proposed, strict=True))
    inputs = [embeddings, hidden, indices, keys, lengths, last, *past.values()]
    return builder.model(DRAFTER, inputs, outputs | written, (), segments.OPSET, segments.IR_VERSION)


def _row(builder: GraphBuilder, value: ir.Value, at: ir.Value) -> ir.Value:
    """Gathers the row `at` [B, 1] of each sequence of `value` [B, S, W]: returns [B, 1, W]."""
    width = last_dim(value)
    row = builder.op("GatherND", [value, at], {"batch_dims": 1}, dtype=FLOAT, shape=[BATCH, width])
    return builder.op("Unsqueeze", [row, builder.weights.integers("axis_1", [1])], dtype=FLOAT, shape=[BATCH, 1, width])
