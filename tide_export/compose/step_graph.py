"""Composes the pieces into one graph that skips: segment 0, then an `If` per further segment, then the head.

The state machine of one step (S new tokens, K segments), all of it in the graph:

    y = segment_0(embed(input_ids));  candidate_0 = tail(lens_0(last position of y))
    waiting = concat(pending_1, y)
    for k = 1 .. K-1:
        score_{k-1} = router_{k-1}(candidate_{k-1})
        if score_{k-1} > skip_threshold_k, or segment k-1 was skipped:
            leave waiting as it is
        else:
            y = segment_k(waiting);  candidate_k = tail(lens_k(last position of y))
            waiting = concat(pending_{k+1}, y), nothing behind the last segment
    logits = head(candidate of the first checkpoint whose score is above its exit threshold, else the last)

What waits in the end belongs in front of the first segment that did not run; what already waited in front of deeper
ones goes on waiting, so the caller keeps it. The last segment's candidates are the `logits_positions`: the last token
alone to generate, more to verify drafts.

The caller sets a skip threshold to the exit threshold, or to 2.0 where more than max pending tokens would wait. That is
enough for a token that has left while a segment was forced to run behind it: deeper segments have at least as many
waiting before them, so they are forced too, and the first score that passed still decides what the head sees.

The lens is the identity where there is none, and behind the last segment. A token that left keeps the state it left
with, also when a segment runs behind it: its output depends on its prefix alone. The result is portable but for
`tide::TideAttention`, which gets its K/V cache here and its kernel in `lower`.

Operators beside the layers are kept few: in a small model one takes as long as reading a hundred kilobytes of weights,
whatever it does. So candidates are matrices [rows, D'], which lets ONNX Runtime fuse products, biases and sigmoids
around them, and what follows from the scores alone (which segments ran, where the token left) is the caller's to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.alibi import relative_biases, step_biases
from tide_export.compose.builder import Block, Weights
from tide_export.compose.cut import Pieces
from tide_export.compose.exits import leaving_state, route, token_dims
from tide_export.compose.kv_cache import attend_from_cache
from tide_export.compose.router_op import norm_kind, normed_size, route_function
from tide_export.errors import GraphError
from tide_export.routers.router import LensArrays, RouterArrays
from tide_export.trace.tracer import OPSET

IR_VERSION = 10
FLOAT, INT32, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL

KEPT = "kept"  # how the dimension of the positions that get logits is called
END = np.iinfo(np.int64).max

INTERNAL = ("candidate", "waiting", "score", "skip")  # what an `If` gives the next, not the caller

RouterWeights = Mapping[int, RouterArrays]  # by layers run
LensWeights = Mapping[int, LensArrays]


def compose(pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None) -> ir.Model:
    """The step graph with an exit at every checkpoint of `pieces`; names and shapes are in `tide_export.names`.

    With no checkpoint (one segment) this is the plain full-depth model.

    Raises:
        GraphError: `routers` does not hold a router of the right width for every checkpoint, or `lenses`, where there
            are any, a lens.
    """
    check_routers(pieces, routers, lenses)
    return Composer(pieces, routers, lenses or {}).compose()


def check_routers(pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None) -> None:
    """Refuses routers and lenses that do not fit `pieces`.

    Raises:
        GraphError: saying which, as `compose` does.
    """
    checkpoints = pieces.boundaries[1:-1]
    for layers in checkpoints:
        if layers not in routers or routers[layers].down.shape[0] != normed_size(pieces):
            raise GraphError(f"no router of width {normed_size(pieces)} for the checkpoint after layer {layers}")
        if lenses and (layers not in lenses or lenses[layers].bias.shape != (pieces.hidden_size,)):
            raise GraphError(f"no lens of width {pieces.hidden_size} for the checkpoint after layer {layers}")
    shortlists = [router.shortlist for router in routers.values()]
    if not all(a is b is None or np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairwise(shortlists)):
        raise GraphError("the routers differ in their shortlists: one graph takes routers of one")


@dataclass
class Step:
    """The values that flow from one segment to the next."""

    candidate: ir.Value  # [1, D'], what the head sees if the token leaves here; [m, D'] behind the last segment
    # Where there are checkpoints:
    waiting: ir.Value | None = None  # [1, n, D], all that waits in front of the next segment that has not run
    # Where there is a next segment:
    score: ir.Value | None = None  # [1, 1], the router's, NaN where it was not reached
    skip: ir.Value | None = None  # bool [1, 1], whether to skip it


class Composer:
    """Writes the graph; `compose.propagate` changes what a skipped segment does."""

    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights):
        self.pieces = pieces
        self.routers = routers
        self.lenses = lenses
        self.bounds = pieces.boundaries
        self.segments = len(pieces.segments)
        self.weights = Weights()
        self.main = Block("main", self.weights)
        width = pieces.hidden_size
        self.token_ids = _input(names.INPUT_IDS, INT64, [1, "sequence"])
        self.total = _input(names.TOTAL_LENGTH, INT32, [])
        self.kept = _input(names.LOGITS_POSITIONS, INT64, [KEPT, 2])
        self.thresholds = _input(names.THRESHOLDS, FLOAT, [self.segments - 1])
        self.skip_thresholds = {k: _input(names.skip_threshold(k), FLOAT, [1]) for k in range(1, self.segments)}
        self.pending = {k: _input(names.pending(k), FLOAT, [1, f"pending_{k}", width]) for k in range(1, self.segments)}
        self.past = {
            (layer, kind): _input(names.past(layer, kind), FLOAT, [1, kv_heads, "capacity", head_dim])
            for layer, (kv_heads, head_dim) in enumerate(pieces.kv_shapes)
            for kind in ("key", "value")
        }
        self.biases: dict[str, ir.Value] = {}
        self.outputs: dict[str, ir.Value] = {}

    def compose(self) -> ir.Model:
        main = self.main
        self.biases = relative_biases(main, self.pieces, self.total)
        step = self._first_segment()
        steps = [step]
        for k in range(1, self.segments):
            step = self._segment_or_skip(k, step)
            steps.append(step)
        chosen = step.candidate
        routing: dict[str, ir.Value] = {}
        if self.segments > 1:
            routing[names.SCORES] = self._scores(steps)
            chosen = self._first_exit(steps, routing[names.SCORES])
        if step.waiting is not None:
            routing[names.NEW_PENDING] = step.waiting
        return self._model({names.LOGITS: self._logits(chosen), **routing, **self.outputs})

    def _logits(self, chosen: ir.Value) -> ir.Value:
        """[m, V] of the states [m, D'] that the head is to see."""
        main, width = self.main, normed_size(self.pieces)
        axis = self.weights.constant("axis_0", np.array([0], dtype=np.int64))
        tokens = main.op("Unsqueeze", [chosen, axis], dtype=FLOAT, shape=[1, KEPT, width])
        (logits,) = main.inline(self.pieces.head, [tokens], token_dims(self.pieces.head, 1, KEPT))
        logits.shape = ir.Shape([1, KEPT, self.pieces.vocab_size])
        return main.op("Squeeze", [logits, axis], dtype=FLOAT, shape=[KEPT, self.pieces.vocab_size])

    def _scores(self, steps: Sequence[Step]) -> ir.Value:
        """All routers' scores, [1, K-1]."""
        found = [step.score for step in steps if step.score is not None]
        return self.main.op("Concat", found, {"axis": 1}, dtype=FLOAT, shape=[1, len(found)])

    def _first_exit(self, steps: Sequence[Step], scores: ir.Value) -> ir.Value:
        """The candidate of the first checkpoint whose score passed, [1, D'], else those of the last segment, [m, D'];
        a score that was not reached is NaN and does not pass.
        """
        main, count = self.main, self.segments - 1
        numbers = self.weights.constant("checkpoint_numbers", np.arange(count, dtype=np.int64)[None])
        none = self.weights.constant("no_checkpoint", np.array([count], dtype=np.int64))
        axis = self.weights.constant("axis_1", np.array([1], dtype=np.int64))
        passed = main.op("Greater", [scores, self.thresholds], dtype=BOOL, shape=[1, count])
        where = main.op("Where", [passed, numbers, none], dtype=INT64, shape=[1, count])
        first = main.op("ReduceMin", [where, axis], {"keepdims": 0}, dtype=INT64, shape=[1])
        width = normed_size(self.pieces)
        candidates = main.op(
            "Concat", [step.candidate for step in steps], {"axis": 0}, dtype=FLOAT, shape=["candidates", width]
        )
        stops = self.weights.constant("candidate_stops", np.array([*range(1, count + 1), END], dtype=np.int64))
        stop = main.op("Gather", [stops, first], {"axis": 0}, dtype=INT64, shape=[1])
        rows = self.weights.constant("axis_0", np.array([0], dtype=np.int64))
        return main.op("Slice", [candidates, first, stop, rows], dtype=FLOAT, shape=[KEPT, width])

    def _first_segment(self) -> Step:
        main = self.main
        positions = self._positions_of(main, self.token_ids, "sequence")
        (x,) = main.inline(self.pieces.embed, [self.token_ids, positions], token_dims(self.pieces.embed, 1, "sequence"))
        y, presents = self._run(main, 0, x, "sequence", positions)
        self.outputs.update(presents)
        step = Step(candidate=self._candidate(main, 0, y, "sequence"))
        if self.segments > 1:
            step.score, step.skip = self._route(main, 0, step.candidate)
            step.waiting = self._waiting(main, 1, y)
        return step

    def _segment_or_skip(self, k: int, step: Step) -> Step:
        """The `If` of segment k; fills the outputs it decides about."""
        segment, run_values = self._segment(k, step)
        skip, skip_values = self._skip(k, step)
        assert run_values.keys() == skip_values.keys()
        branches = {
            "then_branch": skip.graph([skip_values[name] for name in run_values]),
            "else_branch": segment.graph(list(run_values.values())),
        }
        width = self.pieces.hidden_size
        shapes: dict[str, tuple[ir.DataType, list]] = {
            "candidate": (FLOAT, [KEPT if k == self.segments - 1 else 1, normed_size(self.pieces)]),
            "waiting": (FLOAT, [1, f"waiting_{k + 1}", width]),
            "score": (FLOAT, [1, 1]),
            "skip": (BOOL, [1, 1]),
        }
        types: list = []
        for name, value in run_values.items():
            if name in shapes:
                types.append(shapes[name])
            else:
                types.append((FLOAT, list(value.shape) if value.shape is not None else None))
        outputs = dict(zip(run_values, self.main.ops("If", [step.skip], branches, types=types), strict=True))
        internal = {name: outputs.pop(name) for name in INTERNAL if name in outputs}
        self.outputs.update(outputs)
        return Step(**internal)

    def _waiting(self, block: Block, k: int, y: ir.Value) -> ir.Value:
        """What waits in front of segment k once the one before gave y."""
        shape = [1, f"waiting_{k}", self.pieces.hidden_size]
        return block.op("Concat", [self.pending[k], y], {"axis": 1}, dtype=FLOAT, shape=shape)

    def _segment(self, k: int, step: Step) -> tuple[Block, dict[str, ir.Value]]:
        """The branch that runs segment k over all waiting tokens and asks the router behind it."""
        assert step.waiting is not None
        block = Block(f"segment_{k}", self.weights)
        tokens = f"waiting_{k}"
        y, presents = self._run(block, k, step.waiting, tokens, self._positions_of(block, step.waiting, tokens))
        values = {"candidate": self._candidate(block, k, y, tokens)}
        if k < self.segments - 1:
            values["score"], values["skip"] = self._route(block, k, values["candidate"])
            values["waiting"] = self._waiting(block, k + 1, y)
        elif self.pending:
            values["waiting"] = self._copy(block, self._nothing())
        return block, {**values, **presents}

    def _skip(self, k: int, step: Step) -> tuple[Block, dict[str, ir.Value]]:
        """The branch that leaves everything as it is, so that the segments behind are skipped too."""
        assert step.waiting is not None
        assert step.skip is not None
        block = Block(f"skip_{k}", self.weights)
        values = {"candidate": self._copy(block, step.candidate)}
        if k < self.segments - 1 or self.pending:
            values["waiting"] = self._copy(block, step.waiting)
        if k < self.segments - 1:
            nan = self.weights.constant("not_scored", np.full((1, 1), np.nan, dtype=np.float32))
            values["score"] = self._copy(block, nan)
            values["skip"] = self._copy(block, step.skip)
        for layer in range(self.bounds[k], self.bounds[k + 1]):
            for kind, present in zip(("key", "value"), self._skipped(block, k, layer, step.waiting), strict=True):
                values[names.present(layer, kind)] = present
        return block, values

    def _skipped(self, block: Block, k: int, layer: int, waiting: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The K/V buffers of a layer of segment k that is skipped; bound to the same memory, this copies nothing."""
        key, value = (self._copy(block, self.past[layer, kind]) for kind in ("key", "value"))
        return key, value

    def _run(
        self, block: Block, k: int, x: ir.Value, tokens: str, positions: ir.Value
    ) -> tuple[ir.Value, dict[str, ir.Value]]:
        """Segment k on x, its attention given the K/V cache: y [1, tokens, D] and the present buffers by name."""
        piece = self.pieces.segments[k]
        biases = step_biases(block, piece, self.biases, x, tokens)
        start = len(block.nodes)
        (y,) = block.inline(piece, [x, positions], token_dims(piece, 1, tokens))
        presents = attend_from_cache(block.nodes[start:], self.past, self.total, biases)
        return y, presents

    def _positions_of(self, block: Block, x: ir.Value, tokens: str) -> ir.Value:
        """position_ids [1, n] of the last n tokens of the sequence, x being of n tokens; dropped again where nothing
        reads it."""
        length = block.op("Shape", [x], {"start": 1, "end": 2}, dtype=INT64, shape=[1])
        scalar = self.weights.constant("scalar", np.array([], dtype=np.int64))
        one = self.weights.constant("one", np.array(1, dtype=np.int64))
        axis = self.weights.constant("axis_0", np.array([0], dtype=np.int64))
        stop = block.op("Cast", [self.total], {"to": INT64.value}, dtype=INT64, shape=[])
        count = block.op("Reshape", [length, scalar], dtype=INT64, shape=[])
        start = block.op("Sub", [stop, count], dtype=INT64, shape=[])
        flat = block.op("Range", [start, stop, one], dtype=INT64, shape=[tokens])
        return block.op("Unsqueeze", [flat, axis], dtype=INT64, shape=[1, tokens])

    def _route(self, block: Block, index: int, leaving: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Router number `index` on a candidate [1, D']: its score and whether to skip what is behind, both [1, 1]."""
        layers = self.bounds[index + 1]
        return route(block, layers, self.routers[layers], leaving, self.skip_thresholds[index + 1])

    def _candidate(self, block: Block, k: int, y: ir.Value, tokens: str) -> ir.Value:
        """What the head sees if the token leaves behind segment k, [1, D']: y's last position, through lens and tail;
        behind the last segment, the positions that are asked for, [m, D'].

        Without a lens, a tail that is a norm alone is taken of all of y and then its last position: behind the residual
        addition that made y, norm and addition are one operator.
        """
        tail, layers = self.pieces.tail, self.bounds[k + 1]
        lens = self.lenses.get(layers)
        if lens is None and (norm_kind(self.pieces) is not None or k == self.segments - 1):
            (normed,) = block.inline(tail, [y], token_dims(tail, 1, tokens))
            return self._last(block, k, normed)
        last = self.weights.constant("last", np.array([-1], dtype=np.int64))
        state = block.op("Gather", [y, last], {"axis": 1}, dtype=FLOAT, shape=[1, 1, self.pieces.hidden_size])
        return self._last(block, k, leaving_state(block, self.pieces, layers, lens, state))

    def _last(self, block: Block, k: int, states: ir.Value) -> ir.Value:
        """The last position [1, D'] of states [1, n, D'], behind the last segment those of `logits_positions`, [m,
        D']."""
        width = normed_size(self.pieces)
        if k < self.segments - 1:
            last = self.weights.constant("last_row", np.array(-1, dtype=np.int64))
            return block.op("Gather", [states, last], {"axis": 1}, dtype=FLOAT, shape=[1, width])
        return block.op("GatherND", [states, self.kept], dtype=FLOAT, shape=[KEPT, width])

    def _copy(self, block: Block, value: ir.Value) -> ir.Value:
        """A branch may not give out an outer value itself; a copy into the same buffer costs nothing."""
        return block.op("Identity", [value], dtype=value.dtype, shape=value.shape)

    def _nothing(self) -> ir.Value:
        return self.weights.constant("no_tokens", np.zeros((1, 0, self.pieces.hidden_size), dtype=np.float32))

    def _model(self, outputs: dict[str, ir.Value]) -> ir.Model:
        inputs = [self.token_ids, self.total, self.kept]
        if self.segments > 1:
            inputs += [self.thresholds, *self.skip_thresholds.values(), *self.pending.values()]
        inputs += self.past.values()
        values = []
        for name, value in outputs.items():
            if value.producer() is None or value.name in outputs:
                value = self._copy(self.main, value)  # a constant, or already an output under another name
            value.name = name
            values.append(value)
        graph = ir.Graph(
            inputs,
            values,
            nodes=self.main.nodes,
            initializers=list(self.weights.values.values()),
            opset_imports={"": OPSET, names.DOMAIN: 1, "com.microsoft": 1},
            name="tide_step",
        )
        functions = [route_function(self.routers[self.bounds[1]])] if self.segments > 1 else []
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="tide_export", functions=functions)


def _input(name: str, dtype: ir.DataType, shape: list) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
