"""Composes one network per segment, and those that give tokens: what engines without control flow run.

A conditional inside TensorRT saves no time and may not hold attention, so the runtime decides which network runs
(cpp/src/segmented/steps.h; `step_graph` holds the same state machine in one graph). What sequences leave for later runs
stays on the device, in buffers with a block for each slot that the networks update in place:

- K/V buffers, [B, heads, C, width].
- Hidden states pending before every segment but the first, [B, 1, P, D]. A run takes as many as it has tokens, from the
  first on, and appends its own to the next segment's.
- Exit states, what the head reads, [B, 1, P, D']: `TideExit` writes that of a token which exits to one row, and of one
  that does not to another, which nobody reads. The last segment writes those of all its tokens after these rows, so
  that drafts can be verified.

The head's logits stay on the device: where the most likely tokens are enough, small networks find them there.

Batch B, new tokens S and the J first positions of the K/V buffers, which attention reads, are dynamic; C and P are
fixed. Slots with fewer new tokens are padded on the right: what padding writes after a slot's length is overwritten
before it is read.
"""

import numpy as np
import onnx_ir as ir

from tide_export.compose.cut import Pieces
from tide_export.compose.exit_op import exit_function
from tide_export.compose.exits import Checkpoint, exit_and_scatter, exit_states
from tide_export.compose.kv_cache import attend_from_cache, past_buffers, present_outputs
from tide_export.compose.step_graph import LensWeights, RouterWeights, check_routers
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT64, dims, required, typed_value
from tide_export.names import segment_networks as names
from tide_export.names.networks import BEST, CANDIDATES, HEAD, segment_name
from tide_export.routers.router import LensArrays, RouterArrays

OPSET, IR_VERSION = 24, 11  # the first with TensorScatter
BATCH, TOKENS, KEYS = "batch", "tokens", "keys"


def compose_segments(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None, capacity: int, state_rows: int
) -> dict[str, ir.Model]:
    """The networks by name: `segment_name(k)`, shallowest first, and `HEAD`.

    TideAttention in them has ten inputs: query, key, value, past key, past value, past lengths [B], positions [B, S],
    positions that it reads of the buffers [J], sinks [H] and bias by key position [H, N] (the last two may be absent).

    Args:
        capacity: tokens that the K/V buffers hold, C.
        state_rows: hidden states that each other buffer holds, P.

    Raises:
        GraphError: a router or lens is missing or has another width.
    """
    check_routers(pieces, routers, lenses)
    networks = []
    for k in range(len(pieces.segments)):
        layers = pieces.boundaries[k + 1]
        segment = _Segment(pieces, k, capacity, state_rows)
        last = k + 1 == len(pieces.segments)
        networks.append(segment.last() if last else segment.routed(routers[layers], (lenses or {}).get(layers)))
    return {str(network.graph.name): network for network in (*networks, _head(pieces, state_rows))}


class _Segment:
    """Segment k as a network."""

    def __init__(self, pieces: Pieces, k: int, capacity: int, state_rows: int):
        self.pieces, self.k, self.capacity, self.rows = pieces, k, capacity, state_rows
        self.layers = pieces.boundaries[k + 1]
        self.builder = GraphBuilder(segment_name(k), Weights())
        self.inputs: dict[str, ir.Value] = {}
        self.outputs: dict[str, ir.Value] = {}

    def last(self) -> ir.Model:
        """The network without a router."""
        builder = self.builder
        hidden = exit_states(builder, self.pieces, self.layers, None, self._layers())
        batch = builder.op("Shape", [self.inputs[names.PAST_LENGTHS]], dtype=INT64, shape=[1])
        first = builder.op("Expand", [builder.weights.integers("final_row", [names.FINAL_ROW]), batch], dtype=INT64)
        first.shape = ir.Shape([BATCH])
        self.outputs[names.NEW_EXIT_STATES] = self._scatter(self._exit_states(), hidden, first)
        return self._model([])

    def routed(self, router: RouterArrays, lens: LensArrays | None) -> ir.Model:
        """The network with a router, before another segment."""
        builder = self.builder
        y = self._layers()
        following = self._input(names.NEXT_PENDING_STATES, FLOAT, [BATCH, 1, self.rows, self.pieces.carried_size])
        pending = self._input(names.PENDING_LENGTHS, INT64, [BATCH])
        self._input(names.LAST_TOKENS, INT64, [BATCH])
        self._input(names.THRESHOLDS, FLOAT, [BATCH])
        self._exit_states()
        results = exit_and_scatter(builder, self.pieces, Checkpoint(self.layers, router, lens), y, self.inputs)
        call = required(results[0].producer())
        self.outputs[names.NEW_PENDING] = self._scatter(following, y, pending)
        self.outputs |= zip((names.NEW_EXIT_STATES, names.ROUTER_SCORE, names.EXIT_FLAG), results, strict=True)
        return self._model([exit_function(call, OPSET)])

    def _model(self, functions: list[ir.Function]) -> ir.Model:
        name, inputs = segment_name(self.k), list(self.inputs.values())
        return self.builder.model(name, inputs, self.outputs, functions, OPSET, IR_VERSION)

    def _input(self, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        self.inputs[name] = typed_value(name, dtype, shape)
        return self.inputs[name]

    def _exit_states(self) -> ir.Value:
        return self._input(names.EXIT_STATES, FLOAT, [BATCH, 1, self.rows, self.pieces.normalized_size])

    def _layers(self) -> ir.Value:
        """Adds the segment's layers: returns the hidden states after them, [B, S, W]."""
        builder, pieces = self.builder, self.pieces
        if self.k == 0:
            x = self._input(names.INPUT_IDS, INT64, [BATCH, TOKENS])
        else:
            x = self._input(names.PENDING_STATES, FLOAT, [BATCH, 1, self.rows, pieces.carried_size])
        indices = self._input(names.TOKEN_INDICES, INT64, [TOKENS])
        lengths = self._input(names.PAST_LENGTHS, INT64, [BATCH])
        positions = positions_of(builder, lengths, indices, self.capacity)
        if self.k == 0:
            (x,) = builder.inline(pieces.embed, [x, positions], BATCH, TOKENS)
        else:
            shape = [BATCH, TOKENS, pieces.carried_size]
            x = builder.op("Gather", [x, indices], {"axis": 2}, dtype=FLOAT, shape=[BATCH, 1, *shape[1:]])
            x = builder.op("Squeeze", [x, builder.weights.integers("axis_1", [1])], dtype=FLOAT, shape=shape)
        keys = self._input(names.KEY_INDICES, INT64, [KEYS])
        past = past_buffers(pieces.kv_read(self.k), pieces.kv_shapes, BATCH, self.capacity)
        self.inputs |= {str(buffer.name): buffer for buffer in past.values()}
        start = len(builder.nodes)
        (y,) = builder.inline(pieces.segments[self.k], [x, positions], BATCH, TOKENS)
        y.shape = ir.Shape([BATCH, TOKENS, dims(y)[-1]])
        written = attend_from_cache(builder.nodes[start:], past, [lengths, positions, keys])
        self.outputs |= present_outputs(written)
        return y

    def _scatter(self, buffer: ir.Value, hidden: ir.Value, first: ir.Value) -> ir.Value:
        """`buffer` [B, 1, P, D] with `hidden` [B, S, D] from row `first` [B] of each slot on."""
        shape = [BATCH, 1, TOKENS, dims(buffer)[-1]]
        axis = self.builder.weights.integers("axis_1", [1])
        update = self.builder.op("Unsqueeze", [hidden, axis], dtype=FLOAT, shape=shape)
        return self.builder.op("TensorScatter", [buffer, update, first], {"axis": -2}, dtype=FLOAT, shape=dims(buffer))


def positions_of(builder: GraphBuilder, lengths: ir.Value, indices: ir.Value, capacity: int) -> ir.Value:
    """Returns positions int64 [B, S].

    The new tokens `indices` [S] of each slot follow the `lengths` [B] in its cache.
    """
    integers = builder.weights.integers
    start = builder.op("Unsqueeze", [lengths, integers("axis_1", [1])], dtype=INT64, shape=[BATCH, 1])
    positions = builder.op("Add", [start, indices], dtype=INT64, shape=[BATCH, TOKENS])
    # Padding may be beyond the last position; it must not index beyond the tables read by position.
    last = integers("last_place", capacity - 1)
    return builder.op("Min", [positions, last], dtype=INT64, shape=[BATCH, TOKENS])


def _head(pieces: Pieces, state_rows: int) -> ir.Model:
    """Rows [m] of the exit states of all slots -> logits [m, V]."""
    builder, width = GraphBuilder(HEAD, Weights()), pieces.normalized_size
    buffer = typed_value(names.EXIT_STATES, FLOAT, [BATCH, 1, state_rows, width])
    rows = typed_value(names.ROWS, INT64, [TOKENS])
    integers = builder.weights.integers
    hidden = builder.op("Reshape", [buffer, integers("as_rows", [-1, width])], dtype=FLOAT, shape=[None, width])
    hidden = builder.op("Gather", [hidden, rows], {"axis": 0}, dtype=FLOAT, shape=[TOKENS, width])
    hidden = builder.op("Unsqueeze", [hidden, integers("axis_0", [0])], dtype=FLOAT, shape=[1, TOKENS, width])
    (logits,) = builder.inline(pieces.head, [hidden], 1, TOKENS)
    logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape([1, TOKENS, pieces.vocab_size])
    logits = builder.op("Squeeze", [logits, integers("axis_0", [0])], dtype=FLOAT, shape=[TOKENS, pieces.vocab_size])
    return builder.model(HEAD, [buffer, rows], {names.LOGITS: logits}, (), OPSET, IR_VERSION)


def compose_choices(vocab_size: int) -> dict[str, ir.Model]:
    """The networks `BEST` and `CANDIDATES`, which read the head's logits [m, V], in float32 always.

    BEST compares in place of ArgMax, because engines need not return the first of equal logits, which are common where
    the head computes in half precision. The runtime finds out whether the order of equal logits matters to CANDIDATES.
    """
    return {BEST: _best(vocab_size), CANDIDATES: _candidates(vocab_size)}


def _best(vocab_size: int) -> ir.Model:
    builder, logits = GraphBuilder(BEST, Weights()), typed_value(names.LOGITS, FLOAT, [TOKENS, vocab_size])
    last, every = builder.weights.integers("axis_1", [1]), [TOKENS, vocab_size]
    numbers = _without_nan(builder, logits)
    largest = builder.op("ReduceMax", [numbers, last], {"keepdims": 1}, dtype=FLOAT, shape=[TOKENS, 1])
    equal = builder.op("Equal", [numbers, largest], dtype=ir.DataType.BOOL, shape=every)
    ids = builder.weights.constant("every_token", np.arange(vocab_size, dtype=np.int32))
    none = builder.weights.constant("no_token", np.array(vocab_size, np.int32))
    found = builder.op("Where", [equal, ids, none], dtype=ir.DataType.INT32, shape=every)
    token = builder.op("ReduceMin", [found, last], {"keepdims": 0}, dtype=ir.DataType.INT32, shape=[TOKENS])
    best = builder.op("Squeeze", [largest, last], dtype=FLOAT, shape=[TOKENS])
    outputs = {names.BEST_TOKENS: token, names.BEST_LOGITS: best}
    return builder.model(BEST, [logits], outputs, (), OPSET, IR_VERSION)


def _candidates(vocab_size: int) -> ir.Model:
    builder, logits = GraphBuilder(CANDIDATES, Weights()), typed_value(names.LOGITS, FLOAT, [TOKENS, vocab_size])
    count = min(names.MAX_CANDIDATES, vocab_size)
    inputs, shape = [_without_nan(builder, logits), builder.weights.integers("count", [count])], [TOKENS, count]
    values, ids = builder.ops("TopK", inputs, {"axis": 1}, types=[(FLOAT, shape), (INT64, shape)])
    outputs = {names.CANDIDATE_LOGITS: values, names.CANDIDATE_TOKENS: ids}
    return builder.model(CANDIDATES, [logits], outputs, (), OPSET, IR_VERSION)


def _without_nan(builder: GraphBuilder, logits: ir.Value) -> ir.Value:
    """Infinity in place of NaN, so that comparisons are defined and the largest shows that there was one."""
    infinity = builder.weights.float32("infinity", np.array(np.inf))
    known = builder.op("Less", [logits, infinity], dtype=ir.DataType.BOOL, shape=dims(logits))
    return builder.op("Where", [known, logits, infinity], dtype=FLOAT, shape=dims(logits))
