"""Composes the pieces into one graph that skips.

Segment 0 comes first, then an `If` per further segment, then the head.

The graph holds the whole state machine of one step (S new tokens, K segments):

    y = segment_0(embed(input_ids));  exit_state_0 = final_norm(lens_0(last position of y))
    pending = concat(pending_1, y)
    for k = 1 .. K-1:
        score_{k-1} = router_{k-1}(exit_state_{k-1})
        if score_{k-1} > skip_threshold_k, or segment k-1 was skipped:
            keep pending
        else:
            y = segment_k(pending);  exit_state_k = final_norm(lens_k(last position of y))
            pending = concat(pending_{k+1}, y), empty after the last segment
    logits = head(exit state of the first checkpoint whose score is above its exit threshold, else the last)

The pending states at the end belong before the first segment that did not run; the caller keeps those before deeper
segments. The last segment's exit states are at the `logits_positions`: the last token to generate, more to verify
drafts.

The caller sets a skip threshold to the exit threshold, or to 1.0 where more than max pending tokens would be pending:
no score is above it. An exit threshold above 1 turns a checkpoint off: its score need not be computed.
That suffices for a token that exited before a segment was forced to run: deeper segments have at least as many pending
tokens, so they are forced too, and the first score that passed still decides what the head reads.

The lens is the identity where there is none, and after the last segment. A token that exited keeps what it exited
with, also when a later segment runs: its output depends on its prefix alone. The result is portable but for
`tide::TideAttention`, which gets its K/V cache here and its kernel in `lower`.

A draft head may read hidden states of several layers, which the last segment then gives beside its own: `fuse` makes
the final states of them.

Operators beside the layers are kept few: in a small model one takes as long as reading a hundred kilobytes of weights.
So a checkpoint is one, `tide::TideCandidate`, and what follows from the scores alone (which segments ran, where the
token exited) is computed by the caller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from tide_export.compose.checkpoint_op import checkpoint_functions
from tide_export.compose.cut import Pieces
from tide_export.compose.exits import Checkpoint, exit_state_and_score, exit_states
from tide_export.compose.kv_cache import KINDS, attend_from_cache, page_inputs, page_outputs
from tide_export.compose.lora import lora_inputs, read_adapters
from tide_export.compose.states import advance_states, state_inputs, state_outputs
from tide_export.errors import GraphError
from tide_export.graph.builder import OPSET, GraphBuilder, Weights
from tide_export.graph.rewriting import BOOL, FLOAT, INT32, INT64, OutputType, dims, required, static_dim, typed_value
from tide_export.names import paged
from tide_export.names import step_graph as names
from tide_export.routers.router import LensArrays, RouterArrays

POSITIONS = "positions"  # the symbolic dimension of `logits_positions`
END = np.iinfo(np.int64).max

# Outputs of an `If` for the next one, not for the caller.
INTERNAL = ("exit_state", "pending", "final", "score", "skip")

RouterWeights = Mapping[int, RouterArrays]  # by layers run
LensWeights = Mapping[int, LensArrays]


def compose(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None, fuse: ir.Graph | None = None
) -> ir.Model:
    """Composes the step graph with an exit at every checkpoint of `pieces`.

    Names and shapes are in `tide_export.names.step_graph`.

    With no checkpoint (one segment) this is the full-depth model.

    Args:
        fuse: makes the final states, in place of the final norm, of the hidden states that a draft head reads, side by
            side: [B, S, D * layers] -> [B, S, H].

    Raises:
        GraphError: `routers` lack one of the right width for a checkpoint, or a lens has another width.
    """
    check_routers(pieces, routers, lenses)
    return Composer(pieces, routers, lenses or {}, fuse).compose()


def check_routers(pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None) -> None:
    """Checks that routers and lenses fit `pieces`.

    Raises:
        GraphError: naming the first that does not.
    """
    checkpoints = pieces.boundaries[1:-1]
    for layers in checkpoints:
        if layers not in routers or routers[layers].down.shape[0] != pieces.normalized_size:
            raise GraphError(f"no router of width {pieces.normalized_size} for the checkpoint after layer {layers}")
        if lenses and layers in lenses and lenses[layers].bias.shape != (pieces.hidden_size,):
            raise GraphError(f"the lens for the checkpoint after layer {layers} is not of width {pieces.hidden_size}")
    shortlists = [router.shortlist for router in routers.values()]
    if not all(a is b is None or np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairwise(shortlists)):
        raise GraphError("the routers differ in their shortlists: one graph takes routers of one")


@dataclass
class Step:
    """The values that flow from one segment to the next."""

    exit_state: ir.Value  # [1, D'], what the head reads if the token exits here; [m, D'] after the last segment
    # Where there are checkpoints:
    pending: ir.Value | None = None  # [1, n, D], all pending states before the next segment that has not run
    # Where there is a next segment:
    score: ir.Value | None = None  # [1, 1], the router's, NaN where it was not reached
    skip: ir.Value | None = None  # bool [1, 1], whether to skip it
    # After the last segment:
    final: ir.Value | None = None  # [1, n, D'], what the head, or a draft head, reads of all its tokens


class Composer:
    """Builds the graph."""

    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights, fuse: ir.Graph | None = None):
        self.pieces = pieces
        self.routers = routers
        self.lenses = lenses
        self.fuse = fuse
        self.final_size = pieces.normalized_size if fuse is None else static_dim(fuse.outputs[0], -1)
        self.bounds = pieces.boundaries
        self.segments = len(pieces.segments)
        self.weights = Weights()
        self.main = GraphBuilder("main", self.weights)
        width, deeper = pieces.carried_size, range(1, self.segments)
        self.token_ids = typed_value(names.INPUT_IDS, INT64, [1, "sequence"])
        self.lengths = typed_value(names.SEQUENCE_LENGTHS, INT64, [1])
        self.table = typed_value(names.PAGE_TABLE, INT32, [1, "table"])
        self.logits_positions = typed_value(names.LOGITS_POSITIONS, INT64, [POSITIONS, 2])
        self.thresholds = typed_value(names.THRESHOLDS, FLOAT, [self.segments - 1])
        self.skip_thresholds = {k: typed_value(names.skip_threshold(k), FLOAT, [1]) for k in deeper}
        self.pending = {k: typed_value(names.pending(k), FLOAT, [1, f"pending_{k}", width]) for k in deeper}
        self.pages = page_inputs(pieces.kv_caches, pieces.kv_shapes)
        self.state_places = typed_value(names.STATE_PLACES, INT64, [1, 2])
        self.states = state_inputs(pieces.states)
        self.adapters = lora_inputs(pieces.lora, 1)
        self.outputs: dict[str, ir.Value] = {}
        self.checkpoints: list[ir.Node] = []

    @property
    def places(self) -> list[ir.Value | None]:
        """Where attention finds the sequence's tokens: all new ones are its."""
        return [self.table, self.lengths, None]

    def compose(self) -> ir.Model:
        step = self._first_segment()
        steps = [step]
        for k in range(1, self.segments):
            step = self._segment_or_skip(k, step)
            steps.append(step)
        chosen = step.exit_state
        routing: dict[str, ir.Value] = {}
        if self.segments > 1:
            scores = [step.score for step in steps if step.score is not None]
            routing[names.SCORES] = self.main.op("Concat", scores, {"axis": 1}, dtype=FLOAT, shape=[1, len(scores)])
            chosen = self._first_exit(steps, routing[names.SCORES])
        if step.pending is not None:
            routing[names.NEW_PENDING] = step.pending
        inputs = [self.token_ids, self.lengths, self.table, self.logits_positions]
        if self.segments > 1:
            inputs += [self.thresholds, *self.skip_thresholds.values(), *self.pending.values()]
        inputs += self.pages.values()
        if self.states:
            inputs += [self.state_places, *self.states.values()]
        inputs += self.adapters
        final = {names.FINAL_STATES: required(step.final)}
        outputs = {names.LOGITS: self._logits(chosen), **routing, **final, **self.outputs}
        functions = checkpoint_functions(self.checkpoints, OPSET)
        return self.main.model("tide_step", inputs, outputs, functions)

    def _logits(self, hidden: ir.Value) -> ir.Value:
        """Adds the head: returns logits [m, V] of the hidden states [m, D'] that it reads."""
        main, width = self.main, self.pieces.normalized_size
        axis = self.weights.integers("axis_0", [0])
        tokens = main.op("Unsqueeze", [hidden, axis], dtype=FLOAT, shape=[1, POSITIONS, width])
        (logits,) = main.inline(self.pieces.head, [tokens], 1, POSITIONS)
        logits.shape = ir.Shape([1, POSITIONS, self.pieces.vocab_size])
        return main.op("Squeeze", [logits, axis], dtype=FLOAT, shape=[POSITIONS, self.pieces.vocab_size])

    def _first_exit(self, steps: Sequence[Step], scores: ir.Value) -> ir.Value:
        """Returns the exit state of the first checkpoint whose score passed, [1, D'].

        If none passed, those of the last segment, [m, D'].

        A score that was not reached is NaN and does not pass.
        """
        main, integers, count = self.main, self.weights.integers, self.segments - 1
        numbers = integers("checkpoint_numbers", [list(range(count))])
        none, axis = integers("no_checkpoint", [count]), integers("axis_1", [1])
        passed = main.op("Greater", [scores, self.thresholds], dtype=BOOL, shape=[1, count])
        where = main.op("Where", [passed, numbers, none], dtype=INT64, shape=[1, count])
        first = main.op("ReduceMin", [where, axis], {"keepdims": 0}, dtype=INT64, shape=[1])
        width = self.pieces.normalized_size
        all_exit_states = main.op(
            "Concat", [step.exit_state for step in steps], {"axis": 0}, dtype=FLOAT, shape=["all_exit_states", width]
        )
        stops = integers("exit_state_stops", [*range(1, count + 1), END])
        stop = main.op("Gather", [stops, first], {"axis": 0}, dtype=INT64, shape=[1])
        inputs = [all_exit_states, first, stop, integers("axis_0", [0])]
        return main.op("Slice", inputs, dtype=FLOAT, shape=[POSITIONS, width])

    def _first_segment(self) -> Step:
        main = self.main
        positions = self._positions_of(main, self.token_ids, "sequence")
        (x,) = main.inline(self.pieces.embed, [self.token_ids, positions], 1, "sequence")
        y, tapped, written = self._run(main, 0, x, "sequence", positions)
        self.outputs.update(written)
        if self.segments == 1:
            exit_state, final = self._last_states(main, y, tapped)
            return Step(exit_state, final=final)
        exit_state, score, skip = self._checkpoint(main, 0, y)
        return Step(exit_state, self._pending(main, 1, y), score, skip)

    def _segment_or_skip(self, k: int, step: Step) -> Step:
        """The `If` of segment k; adds the outputs that it decides about."""
        run_block, run_values = self._segment(k, step)
        skip_block, skip_values = self._skip(k, step)
        assert run_values.keys() == skip_values.keys()
        branches = {
            "then_branch": skip_block.graph([skip_values[name] for name in run_values]),
            "else_branch": run_block.graph(list(run_values.values())),
        }
        types: dict[str, OutputType] = {name: (FLOAT, value.shape) for name, value in run_values.items()} | {
            "exit_state": (FLOAT, [POSITIONS if k == self.segments - 1 else 1, self.pieces.normalized_size]),
            "pending": (FLOAT, [1, f"pending_{k + 1}", self.pieces.carried_size]),
            "final": (FLOAT, [1, "final_tokens", self.final_size]),
            "score": (FLOAT, [1, 1]),
            "skip": (BOOL, [1, 1]),
        }
        values = self.main.ops("If", [step.skip], branches, types=[types[name] for name in run_values])
        outputs = dict(zip(run_values, values, strict=True))
        internal = {name: outputs.pop(name) for name in INTERNAL if name in outputs}
        self.outputs.update(outputs)
        return Step(**internal)

    def _pending(self, builder: GraphBuilder, k: int, y: ir.Value) -> ir.Value:
        """The pending states before segment k once the segment before it gave y."""
        shape = [1, f"pending_{k}", self.pieces.carried_size]
        return builder.op("Concat", [self.pending[k], y], {"axis": 1}, dtype=FLOAT, shape=shape)

    def _segment(self, k: int, step: Step) -> tuple[GraphBuilder, dict[str, ir.Value]]:
        """The branch that runs segment k over all pending states, and the router after it."""
        builder, pending, tokens = GraphBuilder(f"segment_{k}", self.weights), required(step.pending), f"pending_{k}"
        y, tapped, written = self._run(builder, k, pending, tokens, self._positions_of(builder, pending, tokens))
        values: dict[str, ir.Value] = {}
        if k < self.segments - 1:
            values["exit_state"], values["score"], values["skip"] = self._checkpoint(builder, k, y)
            values["pending"] = self._pending(builder, k + 1, y)
        else:
            values["exit_state"], values["final"] = self._last_states(builder, y, tapped)
        if k == self.segments - 1 and self.pending:
            none = np.zeros((1, 0, self.pieces.carried_size), dtype=np.float32)
            values["pending"] = builder.copy(self.weights.constant("no_tokens", none))
        return builder, {**values, **written}

    def _skip(self, k: int, step: Step) -> tuple[GraphBuilder, dict[str, ir.Value]]:
        """The branch that keeps everything as it is, so that the later segments are skipped too."""
        builder, pending = GraphBuilder(f"skip_{k}", self.weights), required(step.pending)
        values = {"exit_state": builder.copy(step.exit_state)}
        if k < self.segments - 1 or self.pending:
            values["pending"] = builder.copy(pending)
        if k < self.segments - 1:
            values["score"] = builder.copy(self.weights.constant("not_scored", np.full((1, 1), np.nan, np.float32)))
            values["skip"] = builder.copy(required(step.skip))
        else:
            none = np.zeros((1, 0, self.final_size), dtype=np.float32)
            values["final"] = builder.copy(self.weights.constant("no_final_states", none))
        # Bound to the memory of the inputs, these copy nothing.
        kept_pages = {(layer, kind): self.pages[layer, kind] for layer in self.pieces.kv_written(k) for kind in KINDS}
        values |= page_outputs({key: builder.copy(pages) for key, pages in kept_pages.items()})
        kept = {(one.layer, one.number): self.states[one.layer, one.number] for one in self.pieces.states_in(k)}
        values |= state_outputs({key: builder.copy(states) for key, states in kept.items()})
        return builder, values

    def _run(
        self, builder: GraphBuilder, k: int, x: ir.Value, tokens: str, positions: ir.Value
    ) -> tuple[ir.Value, list[ir.Value], dict[str, ir.Value]]:
        """Adds segment k on x, connected to the K/V cache and recurrent states.

        Returns y [1, tokens, W], what a draft head reads, if it gives that, and the new pages and states by name.
        """
        start = len(builder.nodes)
        y, *tapped = builder.inline(self.pieces.segments[k], [x, positions], 1, tokens)
        cache = {key: self.outputs.get(paged.new_pages(*key), pages) for key, pages in self.pages.items()}
        written = page_outputs(attend_from_cache(builder.nodes[start:], cache, self.places))
        read_adapters(builder.nodes[start:], self.pieces.lora, self.adapters)
        sequences = [self.state_places, self.lengths, None]
        written |= state_outputs(advance_states(builder.nodes[start:], self.states, sequences))
        return y, tapped, written

    def _positions_of(self, builder: GraphBuilder, x: ir.Value, tokens: str) -> ir.Value:
        """Returns position_ids [1, n] of the last n tokens of the sequence, for x of n tokens.

        They are removed later if unused.
        """
        length = builder.op("Shape", [x], {"start": 1, "end": 2}, dtype=INT64, shape=[1])
        integers = self.weights.integers
        scalar, one, axis = integers("scalar", []), integers("one", 1), integers("axis_0", [0])
        stop = builder.op("Reshape", [self.lengths, scalar], dtype=INT64, shape=[])
        count = builder.op("Reshape", [length, scalar], dtype=INT64, shape=[])
        start = builder.op("Sub", [stop, count], dtype=INT64, shape=[])
        flat = builder.op("Range", [start, stop, one], dtype=INT64, shape=[tokens])
        return builder.op("Unsqueeze", [flat, axis], dtype=INT64, shape=[1, tokens])

    def _checkpoint(self, builder: GraphBuilder, k: int, y: ir.Value) -> list[ir.Value]:
        """Adds the checkpoint after segment k, for y's last token.

        Returns the exit state [1, D'], the score and whether to skip the next segment, both [1, 1].
        """
        layers = self.bounds[k + 1]
        at = Checkpoint(layers, self.routers[layers], self.lenses.get(layers))
        last, threshold = self.weights.integers("last", [-1]), self.skip_thresholds[k + 1]
        values = exit_state_and_score(builder, self.pieces, at, y, last, threshold)
        self.checkpoints.append(required(values[0].producer()))
        return values

    def _last_states(self, builder: GraphBuilder, y: ir.Value, tapped: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Adds the final norm to y after the last segment.

        Returns what the head reads at `logits_positions`, [m, D'], and of all tokens, [1, n, D'], or what a draft head
        reads of them, [1, n, H].
        """
        hidden, width = exit_states(builder, self.pieces, self.bounds[-1], None, y), self.pieces.normalized_size
        final = hidden if self.fuse is None else builder.inline(self.fuse, tapped, 1, dims(y)[1])[0]
        return builder.op("GatherND", [hidden, self.logits_positions], dtype=FLOAT, shape=[POSITIONS, width]), final
