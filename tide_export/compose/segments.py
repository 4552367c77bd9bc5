"""Composes one network per segment, and one for the head: what engines without control flow run.

A conditional inside TensorRT saves no time and may not hold attention, so the runtime decides which network runs
(`runtime.segmented.sequence`; `step_graph` holds the same state machine in one graph). Segment 0 embeds token ids.
Every network but the last outputs the new hidden states and, at each row's last token, the exit state, the router's
score and the exit flag. The last outputs the final states of all tokens, to verify drafts. Lens and final norm are in
the segment, because the router reads their result, which is also the head's input.

Batch B and new tokens S are dynamic, the K/V buffers have a fixed length. Rows with fewer new tokens are padded on the
right: what padding writes after a row's length is overwritten before it is read.
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block, Weights
from tide_export.compose.cut import Pieces
from tide_export.compose.exits import exit_states, route
from tide_export.compose.kv_cache import attend_from_cache, past_buffers
from tide_export.compose.router_op import route_function
from tide_export.compose.step_graph import LensWeights, RouterWeights, check_routers
from tide_export.trace.rewriting import BOOL, FLOAT, INT32, INT64, dims, typed_value

OPSET, IR_VERSION = 24, 11  # the first with TensorScatter
BATCH, TOKENS = "batch", "tokens"


def compose_segments(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None, capacity: int
) -> dict[str, ir.Model]:
    """The networks by name: `names.segment(k)`, shallowest first, and `names.HEAD`.

    TideAttention in them has ten inputs: query, key, value, past key, past value, past lengths [B], positions [B, S],
    positions of the buffers [1, 1, 1, C], sinks [H] and bias by key position [H, N] (the last two may be absent).

    Args:
        capacity: tokens that the K/V buffers hold, C.

    Raises:
        GraphError: a router or lens is missing or has another width.
    """
    check_routers(pieces, routers, lenses)
    networks = [_Segment(pieces, k, routers, lenses or {}, capacity).model() for k in range(len(pieces.segments))]
    return {str(network.graph.name): network for network in (*networks, _head(pieces))}


class _Segment:
    """Segment k as a network."""

    def __init__(self, pieces: Pieces, k: int, routers: RouterWeights, lenses: LensWeights, capacity: int):
        self.pieces, self.k, self.capacity = pieces, k, capacity
        self.layers = pieces.boundaries[k + 1]
        self.router = routers[self.layers] if k < len(pieces.segments) - 1 else None
        self.lens = lenses.get(self.layers) if self.router is not None else None
        self.block = Block(names.segment(k), Weights())
        self.lengths = typed_value(names.PAST_LENGTHS, INT64, [BATCH])
        self.last = typed_value(names.LAST_TOKENS, INT64, [BATCH])
        self.past = past_buffers(pieces.kv_read(k), pieces.kv_shapes, BATCH, capacity)

    def model(self) -> ir.Model:
        block, pieces = self.block, self.pieces
        if self.k == 0:
            x = typed_value(names.INPUT_IDS, INT64, [BATCH, TOKENS])
        else:
            x = typed_value(names.HIDDEN_STATES, FLOAT, [BATCH, TOKENS, pieces.state_size])
        inputs = [x, self.lengths, self.last]
        positions = self._positions(x)
        if self.k == 0:
            (x,) = block.inline(pieces.embed, [x, positions], BATCH, TOKENS)
        y, presents = self._layers(x, positions)
        if self.router is None:
            final = exit_states(block, pieces, self.layers, None, y)
            outputs = {names.FINAL_STATES: final, names.EXIT_STATES: self._last_token(final)}
            return self._network(inputs, outputs | presents, [])
        states = exit_states(block, pieces, self.layers, self.lens, self._last_token(y))
        threshold = typed_value(names.EXIT_THRESHOLD, FLOAT, [1])
        score, exits = route(block, self.layers, self.router, states, threshold)
        # The function outputs bool and the plugin int32, as plugins may not output bool: two casts fit both.
        shape = exits.shape
        exits = block.op("Cast", [exits], {"to": INT32.value}, dtype=INT32, shape=shape)
        exits = block.op("Cast", [exits], {"to": BOOL.value}, dtype=BOOL, shape=shape)
        outputs = {names.NEW_HIDDEN_STATES: y, names.EXIT_STATES: states}
        outputs |= {names.ROUTER_SCORE: score, names.EXIT_FLAG: exits}
        return self._network([*inputs, threshold], outputs | presents, [route_function(self.router, OPSET)])

    def _network(self, inputs: list[ir.Value], outputs: dict[str, ir.Value], functions: list[ir.Function]) -> ir.Model:
        inputs = [*inputs, *self.past.values()]
        return self.block.model(names.segment(self.k), inputs, outputs, functions, OPSET, IR_VERSION)

    def _positions(self, x: ir.Value) -> ir.Value:
        """int64 [B, S]: each row's new tokens follow those in its cache."""
        block, integers = self.block, self.block.weights.integers
        scalar, zero, one = integers("scalar", []), integers("zero", 0), integers("one", 1)
        axis_0, axis_1 = integers("axis_0", [0]), integers("axis_1", [1])
        count = block.op("Shape", [x], {"start": 1, "end": 2}, dtype=INT64, shape=[1])
        count = block.op("Reshape", [count, scalar], dtype=INT64, shape=[])
        steps = block.op("Range", [zero, count, one], dtype=INT64, shape=[TOKENS])
        steps = block.op("Unsqueeze", [steps, axis_0], dtype=INT64, shape=[1, TOKENS])
        start = block.op("Unsqueeze", [self.lengths, axis_1], dtype=INT64, shape=[BATCH, 1])
        positions = block.op("Add", [start, steps], dtype=INT64, shape=[BATCH, TOKENS])
        # Padding may be beyond the last position; it must not index beyond the tables read by position.
        last = integers("last_place", self.capacity - 1)
        return block.op("Min", [positions, last], dtype=INT64, shape=[BATCH, TOKENS])

    def _layers(self, x: ir.Value, positions: ir.Value) -> tuple[ir.Value, dict[str, ir.Value]]:
        """y [B, S, D] and the buffers after the run, by name."""
        block, piece = self.block, self.pieces.segments[self.k]
        places = np.arange(self.capacity, dtype=np.int64).reshape(1, 1, 1, -1)
        places_of_buffers = block.weights.constant("places", places)
        start = len(block.nodes)
        (y,) = block.inline(piece, [x, positions], BATCH, TOKENS)
        y.shape = ir.Shape([BATCH, TOKENS, dims(y)[-1]])
        inputs = [self.lengths, positions, places_of_buffers]
        return y, attend_from_cache(block.nodes[start:], self.past, inputs)

    def _last_token(self, states: ir.Value) -> ir.Value:
        """[B, S, D] -> [B, 1, D], at each row's last real token."""
        block, width = self.block, dims(states)[-1]
        axis = block.weights.integers("axis_1", [1])
        index = block.op("Unsqueeze", [self.last, axis], dtype=INT64, shape=[BATCH, 1])
        state = block.op("GatherND", [states, index], {"batch_dims": 1}, dtype=FLOAT, shape=[BATCH, width])
        return block.op("Unsqueeze", [state, axis], dtype=FLOAT, shape=[BATCH, 1, width])


def _head(pieces: Pieces) -> ir.Model:
    """Exit states [B, S, D'] -> logits [B, S, V]."""
    block = Block(names.HEAD, Weights())
    states = typed_value(names.EXIT_STATES, FLOAT, [BATCH, TOKENS, pieces.normalized_size])
    (logits,) = block.inline(pieces.head, [states], BATCH, TOKENS)
    logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape([BATCH, TOKENS, pieces.vocab_size])
    return block.model(names.HEAD, [states], {names.LOGITS: logits}, (), OPSET, IR_VERSION)
