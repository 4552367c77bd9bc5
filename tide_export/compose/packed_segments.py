"""Composes the parts of a step over several sequences: every segment, and the head, side by side in one model.

`lower.onnxruntime` lowers the model by the passes of the step graph and saves a network per part. Between segments the
runtime decides which sequences go on, so the parts are not connected: it passes one part's outputs to the next
(cpp/src/packed/batch.h).

The tokens of all sequences are concatenated on one axis, [1, N, ..], so that everything but attention reads each weight
once for all of them and no token is padding. Attention takes each sequence's tokens by where they start.

Where keys and values are propagated (see `compose.propagate`), each segment that sequences can skip has one more part:
it stores the keys and values of its layers for states that tokens exited with.
"""

from dataclasses import dataclass

import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block, Weights
from tide_export.compose.candidate_op import candidate_function
from tide_export.compose.cut import Pieces
from tide_export.compose.exits import candidate_and_route, exit_states
from tide_export.compose.kv_cache import KINDS, attend_from_cache, page_inputs, page_outputs, store_from
from tide_export.compose.states import advance_states, state_inputs, state_outputs
from tide_export.compose.step_graph import LensWeights, RouterWeights, check_routers
from tide_export.trace.rewriting import FLOAT, INT32, INT64, dims, present, typed_value
from tide_export.trace.tracer import OPSET

# N, all tokens of a run; m, those that may exit; R, R + 1 and J of the sequences.
TOKENS, CANDIDATES, SEQUENCES, STARTS, TABLE = "tokens", "candidates", "sequences", "starts", "table"


@dataclass(frozen=True)
class Part:
    """One part of the step: names of values in the model of all parts, by their names in the part's network."""

    name: str  # names.segment(k), names.skipped(k) or names.HEAD
    inputs: dict[str, str]
    outputs: dict[str, str]


def compose_packed(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None
) -> tuple[ir.Model, list[Part]]:
    """The parts of `pieces`, shallowest first and the head last, in one model that holds every weight once.

    Pieces with the layers' keys and values (of a model that propagates them) also give the parts for skipped segments.

    Raises:
        GraphError: a router or lens is missing or has another width.
    """
    check_routers(pieces, routers, lenses)
    return _PackedComposer(pieces, routers, lenses or {}).compose()


class _PackedComposer:
    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights):
        self.pieces, self.routers, self.lenses = pieces, routers, lenses
        self.block = Block("batch", Weights())
        self.positions = typed_value(names.POSITION_IDS, INT64, [1, TOKENS])
        self.last = typed_value(names.LAST_TOKENS, INT64, [CANDIDATES])
        self.places = {
            names.PAGE_TABLE: typed_value(names.PAGE_TABLE, INT32, [SEQUENCES, TABLE]),
            names.SEQUENCE_LENGTHS: typed_value(names.SEQUENCE_LENGTHS, INT64, [SEQUENCES]),
            names.SEQUENCE_STARTS: typed_value(names.SEQUENCE_STARTS, INT64, [STARTS]),
        }
        self.thresholds = typed_value(names.SLOT_THRESHOLDS, FLOAT, [CANDIDATES, 1])
        self.inputs = [self.positions, self.last, self.thresholds, *self.places.values()]
        self.checkpoints: list[ir.Node] = []
        self.outputs: dict[str, ir.Value] = {}
        self.pages = page_inputs(pieces.kv_caches, pieces.kv_shapes)
        self.state_places = typed_value(names.STATE_PLACES, INT64, [SEQUENCES, 2])
        self.states = state_inputs(pieces.states)
        if self.states:
            self.inputs += [self.state_places, *self.states.values()]

    def compose(self) -> tuple[ir.Model, list[Part]]:
        count = len(self.pieces.segments)
        parts = [self._segment(k) for k in range(count)]
        if self.pieces.keys_values:
            parts += [self._skipped(k) for k in range(1, count) if self.pieces.kv_written(k)]
        parts.append(self._head())
        functions = {call.op_type: candidate_function(call, OPSET) for call in self.checkpoints}
        inputs = [*self.inputs, *self.pages.values()]
        return self.block.model("tide_batch_step", inputs, self.outputs, list(functions.values())), parts

    def _segment(self, k: int) -> Part:
        block, pieces = self.block, self.pieces
        name, layers = names.segment(k), pieces.boundaries[k + 1]
        if k == 0:
            entry = typed_value(names.INPUT_IDS, INT64, [1, TOKENS])
            (x,) = block.inline(pieces.embed, [entry, self.positions], 1, TOKENS)
        else:
            x = entry = typed_value(f"{name}/{names.HIDDEN_STATES}", FLOAT, [1, TOKENS, pieces.state_size])
        self.inputs.append(entry)
        start = len(block.nodes)
        y, *_ = block.inline(pieces.segments[k], [x, self.positions], 1, TOKENS)
        written = page_outputs(attend_from_cache(block.nodes[start:], self.pages, list(self.places.values())))
        sequences = [self.state_places, self.places[names.SEQUENCE_LENGTHS], self.places[names.SEQUENCE_STARTS]]
        written |= state_outputs(advance_states(block.nodes[start:], self.states, sequences))
        shared = [names.POSITION_IDS, names.LAST_TOKENS, *self.places]
        if k + 1 < len(pieces.segments):
            states, score = self._checkpoint(layers, y)
            values = {names.EXIT_STATES: states, names.NEW_HIDDEN_STATES: y, names.ROUTER_SCORE: score}
            shared.append(names.SLOT_THRESHOLDS)
        else:
            values = {names.EXIT_STATES: self._final_states(y)}
        shared += [names.pages(layer, kind) for layer in pieces.kv_read(k) for kind in KINDS]
        if own := pieces.states_in(k):
            shared += [names.STATE_PLACES, *(names.states(one.layer, one.number) for one in own)]
        inputs = {names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: str(entry.name)} | {i: i for i in shared}
        outputs = {output: f"{name}/{output}" for output in values} | {output: output for output in written}
        self.outputs |= {f"{name}/{output}": value for output, value in values.items()} | written
        return Part(name, inputs, outputs)

    def _checkpoint(self, layers: int, y: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Of the sequences' last tokens, what the head reads should they exit after `layers`, [m, D'], and the scores
        [m, 1], which the runtime compares with each sequence's threshold."""
        router, lens = self.routers[layers], self.lenses.get(layers)
        states, score, exits = candidate_and_route(
            self.block, self.pieces, layers, router, lens, y, self.last, self.thresholds
        )
        self.checkpoints.append(present(exits.producer()))
        return states, score

    def _final_states(self, y: ir.Value) -> ir.Value:
        """What the head reads of the sequences' last tokens after the last segment, [m, D'].

        As in `step_graph`, a final norm that is one operator is applied to all of y, where it fuses with the residual
        addition.
        """
        layers = self.pieces.boundaries[-1]
        if self.pieces.norm_alone:
            states = self._last_tokens(exit_states(self.block, self.pieces, layers, None, y))
        else:
            states = exit_states(self.block, self.pieces, layers, None, self._last_tokens(y))
        shape, axis = dims(states)[1:], self.block.weights.integers("axis_0", [0])
        return self.block.op("Squeeze", [states, axis], dtype=FLOAT, shape=shape)

    def _last_tokens(self, states: ir.Value) -> ir.Value:
        shape = [1, CANDIDATES, dims(states)[-1]]
        return self.block.op("Gather", [states, self.last], {"axis": 1}, dtype=FLOAT, shape=shape)

    def _skipped(self, k: int) -> Part:
        """States [1, N, D] of tokens that exited before segment k, and their positions -> the pages of its layers."""
        pieces, name = self.pieces, names.skipped(k)
        states = typed_value(f"{name}/{names.HIDDEN_STATES}", FLOAT, [1, TOKENS, pieces.state_size])
        self.inputs.append(states)
        inputs = {names.HIDDEN_STATES: str(states.name)}
        inputs |= {each: each for each in (names.POSITION_IDS, *self.places)}
        outputs = {}
        for layer in pieces.kv_written(k):
            entries = [states, self.positions]
            written = store_from(self.block, pieces, layer, entries, TOKENS, self.pages, list(self.places.values()))
            inputs |= {names.pages(*key): names.pages(*key) for key in written}
            for output, value in page_outputs(written).items():
                outputs[output] = f"{name}/{output}"
                self.outputs[outputs[output]] = value
        return Part(name, inputs, outputs)

    def _head(self) -> Part:
        """Exit states [1, m, D'] -> logits [1, m, V]."""
        pieces = self.pieces
        entry = typed_value(f"{names.HEAD}/{names.EXIT_STATES}", FLOAT, [1, CANDIDATES, pieces.normalized_size])
        self.inputs.append(entry)
        (logits,) = self.block.inline(pieces.head, [entry], 1, CANDIDATES)
        logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape([1, CANDIDATES, pieces.vocab_size])
        self.outputs[names.LOGITS] = logits
        return Part(names.HEAD, {names.EXIT_STATES: str(entry.name)}, {names.LOGITS: names.LOGITS})
