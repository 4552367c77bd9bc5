"""Composes the parts of a step over several sequences side by side in one model.

The parts are every segment and the head.

`lower.onnxruntime` lowers the model by the passes of the step graph and saves a network per part. Between segments the
runtime decides which sequences go on, so the parts are not connected: it passes one part's outputs to the next
(cpp/src/paged/batch.h).

The tokens of all sequences are concatenated on one axis, [1, N, ..], so that everything but attention reads each weight
once for all of them and no token is padding. Attention takes each sequence's tokens by where they start. A model that
takes one token's position and counts on from there gets networks for one sequence, R = 1.
"""

from dataclasses import dataclass

import onnx_ir as ir

from tide_export.compose.checkpoint_op import checkpoint_functions
from tide_export.compose.cut import Pieces, counts_positions
from tide_export.compose.exits import Checkpoint, exit_state_and_score, exit_states
from tide_export.compose.kv_cache import KINDS, attend_from_cache, page_inputs, page_outputs
from tide_export.compose.lora import lora_inputs, read_adapters
from tide_export.compose.states import advance_states, state_inputs, state_outputs
from tide_export.compose.step_graph import LensWeights, RouterWeights, check_routers
from tide_export.graph.builder import OPSET, GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT32, INT64, dims, required, typed_value
from tide_export.names import batch_networks as names
from tide_export.names import paged
from tide_export.names.networks import HEAD, segment_name

# N, all tokens of a run; m, those that may exit; R, R + 1 and J of the sequences.
TOKENS, SCORED, SEQUENCES, STARTS, TABLE = "tokens", "scored", "sequences", "starts", "table"


@dataclass(frozen=True)
class Part:
    """Holds one part of the step: names of values in the shared model, by their names in its network."""

    name: str  # segment_name(k) or HEAD
    inputs: dict[str, str]
    outputs: dict[str, str]


def compose_packed(
    pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None, fuse: ir.Graph | None = None
) -> tuple[ir.Model, list[Part]]:
    """Composes the parts of `pieces`, shallowest first and the head last, in one model.

    The model holds every weight once.

    Args:
        fuse: makes the draft states of those that a draft head reads, as in `step_graph.compose`.

    Raises:
        GraphError: a router or lens is missing or has another width.
    """
    check_routers(pieces, routers, lenses)
    return _PackedComposer(pieces, routers, lenses or {}, fuse).compose()


class _PackedComposer:
    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights, fuse: ir.Graph | None):
        self.pieces, self.routers, self.lenses, self.fuse = pieces, routers, lenses, fuse
        sequences, starts = (1, 2) if counts_positions(pieces) else (SEQUENCES, STARTS)
        self.builder = GraphBuilder("batch", Weights())
        self.positions = typed_value(names.POSITION_IDS, INT64, [1, TOKENS])
        self.last = typed_value(names.LAST_TOKENS, INT64, [SCORED])
        self.places = {
            names.PAGE_TABLE: typed_value(names.PAGE_TABLE, INT32, [sequences, TABLE]),
            names.SEQUENCE_LENGTHS: typed_value(names.SEQUENCE_LENGTHS, INT64, [sequences]),
            names.SEQUENCE_STARTS: typed_value(names.SEQUENCE_STARTS, INT64, [starts]),
        }
        self.thresholds = typed_value(names.SLOT_THRESHOLDS, FLOAT, [SCORED, 1])
        self.inputs = [self.positions, self.last, self.thresholds, *self.places.values()]
        self.checkpoints: list[ir.Node] = []
        self.outputs: dict[str, ir.Value] = {}
        self.pages = page_inputs(pieces.kv_caches, pieces.kv_shapes)
        self.state_places = typed_value(names.STATE_PLACES, INT64, [sequences, 2])
        self.states = state_inputs(pieces.states)
        if self.states:
            self.inputs += [self.state_places, *self.states.values()]
        self.adapters = lora_inputs(pieces.lora, sequences)
        self.inputs += self.adapters

    def compose(self) -> tuple[ir.Model, list[Part]]:
        count = len(self.pieces.segments)
        parts = [self._segment(k) for k in range(count)]
        parts.append(self._head())
        functions = checkpoint_functions(self.checkpoints, OPSET)
        inputs = [*self.inputs, *self.pages.values()]
        return self.builder.model("tide_batch_step", inputs, self.outputs, functions), parts

    def _segment(self, k: int) -> Part:
        builder, pieces = self.builder, self.pieces
        name, layers = segment_name(k), pieces.boundaries[k + 1]
        if k == 0:
            entry = typed_value(names.INPUT_IDS, INT64, [1, TOKENS])
            (x,) = builder.inline(pieces.embed, [entry, self.positions], 1, TOKENS)
        else:
            x = entry = typed_value(f"{name}/{names.HIDDEN_STATES}", FLOAT, [1, TOKENS, pieces.carried_size])
        self.inputs.append(entry)
        start = len(builder.nodes)
        y, *tapped = builder.inline(pieces.segments[k], [x, self.positions], 1, TOKENS)
        written = page_outputs(attend_from_cache(builder.nodes[start:], self.pages, list(self.places.values())))
        sequences = [self.state_places, self.places[names.SEQUENCE_LENGTHS], self.places[names.SEQUENCE_STARTS]]
        written |= state_outputs(advance_states(builder.nodes[start:], self.states, sequences))
        shared = [names.POSITION_IDS, names.LAST_TOKENS, *self.places]
        starts = self.places[names.SEQUENCE_STARTS]
        if read_adapters(builder.nodes[start:], pieces.lora, [*self.adapters, starts]):
            shared += [paged.LORA_WEIGHTS, paged.ADAPTERS]
        if k + 1 < len(pieces.segments):
            hidden, score = self._checkpoint(layers, y)
            values = {names.EXIT_STATES: hidden, names.NEW_HIDDEN_STATES: y, names.ROUTER_SCORE: score}
            shared.append(names.SLOT_THRESHOLDS)
        else:
            values = {names.EXIT_STATES: self._final_states(y)}
            if self.fuse is not None:
                (values[names.DRAFT_STATES],) = builder.inline(self.fuse, tapped, 1, TOKENS)
        shared += [paged.pages(layer, kind) for layer in pieces.kv_read(k) for kind in KINDS]
        if own := pieces.states_in(k):
            shared += [names.STATE_PLACES, *(paged.states(one.layer, one.number) for one in own)]
        inputs = {names.INPUT_IDS if k == 0 else names.HIDDEN_STATES: str(entry.name)} | {i: i for i in shared}
        outputs = {output: f"{name}/{output}" for output in values} | {output: output for output in written}
        self.outputs |= {f"{name}/{output}": value for output, value in values.items()} | written
        return Part(name, inputs, outputs)

    def _checkpoint(self, layers: int, y: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Adds the checkpoint after `layers`, for the sequences' last tokens.

        Returns exit states [m, D'] and scores [m, 1], which the runtime compares with each sequence's threshold.
        """
        at = Checkpoint(layers, self.routers[layers], self.lenses.get(layers))
        hidden, score, exits = exit_state_and_score(self.builder, self.pieces, at, y, self.last, self.thresholds)
        self.checkpoints.append(required(exits.producer()))
        return hidden, score

    def _final_states(self, y: ir.Value) -> ir.Value:
        """Adds the final norm: returns what the head reads of the last tokens, [m, D'].

        As in `step_graph`, a final norm that is one operator is applied to all of y, where it fuses with the residual
        addition.
        """
        layers = self.pieces.boundaries[-1]
        if self.pieces.norm_alone:
            hidden = self._last_tokens(exit_states(self.builder, self.pieces, layers, None, y))
        else:
            hidden = exit_states(self.builder, self.pieces, layers, None, self._last_tokens(y))
        shape, axis = dims(hidden)[1:], self.builder.weights.integers("axis_0", [0])
        return self.builder.op("Squeeze", [hidden, axis], dtype=FLOAT, shape=shape)

    def _last_tokens(self, hidden: ir.Value) -> ir.Value:
        shape = [1, SCORED, dims(hidden)[-1]]
        return self.builder.op("Gather", [hidden, self.last], {"axis": 1}, dtype=FLOAT, shape=shape)

    def _head(self) -> Part:
        """Composes the head: exit states [1, m, D'] -> logits [1, m, V]."""
        pieces = self.pieces
        entry = typed_value(f"{HEAD}/{names.EXIT_STATES}", FLOAT, [1, SCORED, pieces.normalized_size])
        self.inputs.append(entry)
        (logits,) = self.builder.inline(pieces.head, [entry], 1, SCORED)
        logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape([1, SCORED, pieces.vocab_size])
        self.outputs[names.LOGITS] = logits
        return Part(HEAD, {names.EXIT_STATES: str(entry.name)}, {names.LOGITS: names.LOGITS})
