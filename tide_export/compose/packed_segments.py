"""From the same cut, the parts of a step over several sequences at once: every segment, and the head, side by side.

Stands beside `compose` and is lowered by the same passes; `lower.onnxruntime.packed` then gives each sequence of a
batch its own attention and makes a network of each part. A step decides between segments which sequences go on, so
nothing joins the parts: what one gives, the host hands to the next (`runtime.packed.batch`).

All sequences' tokens lie behind one another on one axis, [1, N, ..], so that everything but attention reads each weight
once for all of them and no token is padding.

Where keys and values are propagated (`compose.propagate` has the rule) a segment that some sequences skip has a part of
its own for these: from the states they left with to its layers' keys and values. It holds no K/V buffers: an attention
to write them by, as in the one graph, would read them whole, for each sequence and layer. The host writes them.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block, Weights
from tide_export.compose.cut import Pieces
from tide_export.compose.exits import leaving_state, route, token_dims
from tide_export.compose.kv_cache import attend_from_cache
from tide_export.compose.router_op import norm_kind, normed_size, route_function
from tide_export.compose.step_graph import IR_VERSION, LensWeights, RouterWeights, check_routers
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.trace.tracer import OPSET

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
TOKENS, ASKED = "tokens", "asked"  # N, all tokens of a run; m, those that may leave


@dataclass(frozen=True)
class Part:
    """One part of the step: names in the model of all parts, by the names in a network of its own."""

    name: str  # names.segment(k), names.skipped(k) or names.HEAD
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def has_rows(self) -> bool:
        """Whether it holds K/V buffers, so that each size of batch needs a network of its own."""
        return names.TOTAL_LENGTH in self.inputs


def compose_batch(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None
) -> tuple[ir.Model, list[Part]]:
    """The parts of `pieces`, shallowest first and the head last, in one model that holds every weight once.

    K/V buffers and lengths are those of one sequence yet: `lower.onnxruntime.PackedRowsPass` replaces them. Pieces with
    the layers' keys and values, which only a model that propagates them is cut into, give the parts for that too.

    Raises:
        GraphError: a router or lens is missing or of another width.
    """
    check_routers(pieces, routers, lenses)
    return _Batch(pieces, routers, lenses or {}).compose()


class _Batch:
    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights):
        self.pieces, self.routers, self.lenses = pieces, routers, lenses
        self.block = Block("batch", Weights())
        self.positions = _input(names.POSITION_IDS, INT64, [1, TOKENS])
        self.last = _input(names.LAST_TOKENS, INT64, [ASKED])
        self.total = _input(names.TOTAL_LENGTH, INT32, [])
        self.inputs = [self.positions, self.last, self.total]
        self.outputs: dict[str, ir.Value] = {}
        self.past = {
            (layer, kind): _input(names.past(layer, kind), FLOAT, [1, kv_heads, "capacity", head_dim])
            for layer, (kv_heads, head_dim) in enumerate(pieces.kv_shapes)
            for kind in ("key", "value")
        }

    def compose(self) -> tuple[ir.Model, list[Part]]:
        pieces = self.pieces
        parts = [self._segment(k) for k in range(len(pieces.segments))]
        if pieces.keys_values:
            parts += [self._skipped(k) for k in range(1, len(pieces.segments))]
        parts.append(self._head())
        values = []
        for name, value in self.outputs.items():
            if value.producer() is None or value.name in self.outputs:
                value = self.block.op("Identity", [value], dtype=value.dtype, shape=value.shape)
            value.name = name
            values.append(value)
        graph = ir.Graph(
            [*self.inputs, *self.past.values()],
            values,
            nodes=self.block.nodes,
            initializers=list(self.block.weights.values.values()),
            opset_imports={"": OPSET, names.DOMAIN: 1, "com.microsoft": 1},
            name="tide_batch_step",
        )
        functions = [route_function(next(iter(self.routers.values())))] if len(pieces.segments) > 1 else []
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="tide_export", functions=functions), parts

    def _segment(self, k: int) -> Part:
        block, pieces, width = self.block, self.pieces, self.pieces.hidden_size
        name, layers = names.segment(k), pieces.boundaries[k + 1]
        if k == 0:
            entry = _input(names.INPUT_IDS, INT64, [1, TOKENS])
            (x,) = block.inline(pieces.embed, [entry, self.positions], token_dims(pieces.embed, 1, TOKENS))
        else:
            x = entry = _input(f"{name}/{names.HIDDEN_STATES}", FLOAT, [1, TOKENS, width])
        self.inputs.append(entry)
        start = len(block.nodes)
        piece = pieces.segments[k]
        (y,) = block.inline(piece, [x, self.positions], token_dims(piece, 1, TOKENS))
        given = attend_from_cache(block.nodes[start:], self.past, self.total, {})
        leaving = self._leaving(layers, y)
        made = {names.EXIT_STATES: leaving}
        if k + 1 < len(pieces.segments):
            made[names.NEW_HIDDEN_STATES] = y
            made[names.ROUTER_SCORE] = self._score(layers, leaving)
        inputs = {
            names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: str(entry.name),
            names.POSITION_IDS: names.POSITION_IDS,
            names.LAST_TOKENS: names.LAST_TOKENS,
            names.TOTAL_LENGTH: names.TOTAL_LENGTH,
        }
        for layer in range(pieces.boundaries[k], layers):
            inputs |= {names.past(layer, kind): names.past(layer, kind) for kind in ("key", "value")}
        outputs = {output: f"{name}/{output}" for output in made} | {output: output for output in given}
        self.outputs |= {f"{name}/{output}": value for output, value in made.items()} | given
        return Part(name, inputs, outputs)

    def _leaving(self, layers: int, y: ir.Value) -> ir.Value:
        """What the head sees of the tokens asked about should they leave after `layers`: [1, m, D'] (as in `compose`,
        a norm alone is taken of all of y: behind the residual addition the two are one operator)."""
        pieces, lens = self.pieces, self.lenses.get(layers)
        if lens is None and norm_kind(pieces) is not None:
            (normed,) = self.block.inline(pieces.tail, [y], token_dims(pieces.tail, 1, TOKENS))
            return self._asked(normed)
        return leaving_state(self.block, pieces, layers, lens, self._asked(y))

    def _asked(self, states: ir.Value) -> ir.Value:
        assert states.shape is not None
        shape = [1, ASKED, states.shape[-1]]
        return self.block.op("Gather", [states, self.last], {"axis": 1}, dtype=FLOAT, shape=shape)

    def _score(self, layers: int, leaving: ir.Value) -> ir.Value:
        """[m, 1, 1]; the verdict on it is the host's, whose sequences may have thresholds of their own."""
        off = self.block.weights.constant("no_threshold", np.array([NEVER_EXIT], dtype=np.float32))
        turned = self.block.op(
            "Transpose", [leaving], {"perm": [1, 0, 2]}, dtype=FLOAT, shape=[ASKED, 1, normed_size(self.pieces)]
        )
        score, _ = route(self.block, layers, self.routers[layers], turned, off)
        return score

    def _skipped(self, k: int) -> Part:
        """States [1, m, D] that tokens left with before segment k, and their places -> its layers' keys and values."""
        pieces, name = self.pieces, names.skipped(k)
        states = _input(f"{name}/{names.HIDDEN_STATES}", FLOAT, [1, ASKED, pieces.hidden_size])
        positions = _input(f"{name}/{names.POSITION_IDS}", INT64, [1, ASKED])
        self.inputs += [states, positions]
        outputs = {}
        for layer in range(pieces.boundaries[k], pieces.boundaries[k + 1]):
            piece, (kv_heads, head_dim) = pieces.keys_values[layer], pieces.kv_shapes[layer]
            made = self.block.inline(piece, [states, positions], token_dims(piece, 1, ASKED))
            for kind, value in zip(("key", "value"), made, strict=True):
                value.type, value.shape = ir.TensorType(FLOAT), ir.Shape([1, kv_heads, ASKED, head_dim])
                outputs[names.new(layer, kind)] = f"{name}/{names.new(layer, kind)}"
                self.outputs[outputs[names.new(layer, kind)]] = value
        inputs = {names.HIDDEN_STATES: str(states.name), names.POSITION_IDS: str(positions.name)}
        return Part(name, inputs, outputs)

    def _head(self) -> Part:
        """Exit states [1, m, D'] -> logits [1, m, V]."""
        pieces = self.pieces
        entry = _input(f"{names.HEAD}/{names.EXIT_STATES}", FLOAT, [1, ASKED, normed_size(pieces)])
        self.inputs.append(entry)
        (logits,) = self.block.inline(pieces.head, [entry], token_dims(pieces.head, 1, ASKED))
        logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape([1, ASKED, pieces.vocab_size])
        self.outputs[names.LOGITS] = logits
        return Part(names.HEAD, {names.EXIT_STATES: str(entry.name)}, {names.LOGITS: names.LOGITS})


def _input(name: str, dtype: ir.DataType, shape: list) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
