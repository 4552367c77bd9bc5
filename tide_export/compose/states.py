"""Connects the traced operators of layers with a recurrent state to the states of sequences.

Each sequence has a place in the state tensors of all. A state is not the newest one alone: drafts that are rejected are
taken back, and a run that failed is run again. So

- of a convolution a place holds the inputs of the last tokens, [K - 1 + LOG, D], by position modulo their number;
- of a recurrence it holds each head's state after some number of tokens, [Hv, Dk Dv + 1], that number last, and what
  each of the tokens after these changes in it, [LOG, N], by position modulo LOG: decays [Hv, ..] and deltas [Hv, Dv] of
  all heads, then keys [Hk, Dk]. A run first adds the tokens that nobody will take back to the state, and computes with
  a copy of it that has the others too.

Tokens take their turn one by one, whatever run they are in, so that their outputs have the same bits in any.
"""

from collections.abc import Mapping, Sequence
from math import prod

import onnx_ir as ir

from tide_export.bundle.model_info import StateInfo
from tide_export.graph.rewriting import FLOAT, required, static_dim, typed_value
from tide_export.names import paged as names
from tide_export.names.operators import DOMAIN, OP_CAUSAL_CONV, STATE_OPERATORS

LOG = 32  # tokens that can be taken back; those of one run and of drafts before it, at most
LARGE_LOG = 8  # of a recurrence whose decays are as large as its state

States = dict[tuple[int, int], ir.Value]  # by layer and number


def keeps_state(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in STATE_OPERATORS


def shapes_of(nodes: Sequence[ir.Node]) -> tuple[StateInfo, ...]:
    """The states of the operators among `nodes`, by layer and number."""
    shapes = []
    for node in filter(keeps_state, nodes):
        layer, first = node.attributes["layer"].as_int(), 2 * node.attributes["number"].as_int()
        shapes += [StateInfo(layer, first + i, shape, undo) for i, (shape, undo) in enumerate(_shapes(node))]
    return tuple(sorted(shapes, key=lambda one: (one.layer, one.number)))


def _shapes(node: ir.Node) -> list[tuple[tuple[int, ...], int]]:
    """The shapes of a node's states, and the tokens that each can take back."""
    if node.op_type == OP_CAUSAL_CONV:
        taps, channels = static_dim(required(node.inputs[1]), 0), static_dim(required(node.inputs[0]), -1)
        return [((taps - 1 + LOG, channels), LOG)]
    key, value, decay = (required(node.inputs[i]) for i in (1, 2, 3))
    (key_heads, width), (heads, depth) = ([static_dim(one, axis) for axis in (2, 3)] for one in (key, value))
    decays = prod(static_dim(decay, axis) for axis in range(2, len(required(decay.shape))))
    log = LARGE_LOG if decays >= heads * width * depth > heads else LOG
    return [((heads, width * depth + 1), log), ((log, decays + heads * depth + key_heads * width), log)]


def state_inputs(shapes: Sequence[StateInfo]) -> States:
    """Inputs for the states of all sequences."""
    return {
        (one.layer, one.number): typed_value(names.states(one.layer, one.number), FLOAT, ["places", *one.shape])
        for one in shapes
    }


def advance_states(nodes: Sequence[ir.Node], states: States, sequences: Sequence[ir.Value | None]) -> States:
    """Makes every operator of a recurrent state among `nodes` read and write the states.

    Returns the written values.

    After the inputs of the trace come the states and `sequences`: places [R, 2], lengths [R] and, of several sequences,
    starts [R + 1]; a bias or beta is before the last of these. After the output come the new states.
    """
    written: States = {}
    for node in filter(keeps_state, nodes):
        layer, first = node.attributes["layer"].as_int(), 2 * node.attributes["number"].as_int()
        convolves = node.op_type == OP_CAUSAL_CONV
        own = [(layer, first)] if convolves else [(layer, first), (layer, first + 1)]
        *tokens, last = [*node.inputs, None][: 3 if convolves else 5]
        places, lengths, starts = sequences
        inputs = [*tokens, *(states[key] for key in own), places, lengths, last, starts]
        node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        node.resize_outputs(1 + len(own))
        for key, value in zip(own, node.outputs[1:], strict=True):
            before = states[key]
            value.name, value.type, value.shape = f"{node.name}.states_{key[1]}", before.type, before.shape
            written[key] = value
    return written


def state_outputs(written: Mapping[tuple[int, int], ir.Value]) -> dict[str, ir.Value]:
    """Returns written states by the names of the outputs."""
    return {names.new_states(*key): value for key, value in written.items()}
