"""Adds what a checkpoint computes: what the head reads at an exit, and the router on it.

The step graph and the segment networks share these functions, so that both exit by the same arithmetic.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from tide_export.compose.cut import Pieces
from tide_export.compose.exit_op import NORMS, exit_attributes
from tide_export.graph.builder import GraphBuilder
from tide_export.graph.rewriting import BOOL, FLOAT, INT32, INT64, dims, required
from tide_export.names import segment_networks as names
from tide_export.names.operators import DOMAIN, OP_CANDIDATE, OP_EXIT, OP_LENS_CANDIDATE
from tide_export.routers.router import LensArrays, RouterArrays


class Checkpoint(NamedTuple):
    """Holds the router of a checkpoint, its lens, if it has one, and the number of layers before it."""

    layers: int
    router: RouterArrays
    lens: LensArrays | None


def exit_states(
    builder: GraphBuilder, pieces: Pieces, layers: int, lens: LensArrays | None, hidden: ir.Value
) -> ir.Value:
    """Adds the lens, if there is one, and the final norm to hidden states.

    `hidden`: [B, m, W] or [B, m, D]; returns what the head reads, [B, m, D'].
    """
    hidden = _hidden_states(builder, pieces, hidden)
    batch, tokens, _ = shape = dims(hidden)
    if lens is not None:
        down, up, bias = _lens_weights(builder, layers, lens)
        low = builder.op("MatMul", [hidden, down], dtype=FLOAT, shape=[batch, tokens, lens.down.shape[1]])
        change = builder.op("MatMul", [low, up], dtype=FLOAT, shape=shape)
        change = builder.op("Add", [change, bias], dtype=FLOAT, shape=shape)
        hidden = builder.op("Add", [hidden, change], dtype=FLOAT, shape=shape)
    (normalized,) = builder.inline(pieces.final_norm, [hidden], batch, tokens)
    return normalized


def exit_state_and_score(
    builder: GraphBuilder, pieces: Pieces, at: Checkpoint, hidden: ir.Value, last: ir.Value, thresholds: ir.Value
) -> list[ir.Value]:
    """Adds a checkpoint as one `TideCandidate`.

    Returns, for the tokens `last` [m] of `hidden` [1, n, W], the exit state [m, D'], the score [m, 1] and whether that
    is above `thresholds` [m, 1], bool [m, 1].

    A final norm that `TideCandidate` has no form for comes before it, at these tokens alone. Where the states hold
    their scores (`Pieces.exit_shares`), there is no `TideCandidate`.
    """
    (count,) = dims(last)
    if pieces.exit_shares:
        return _held_score(builder, pieces, at, hidden, last, thresholds)
    if pieces.norm_alone:
        hidden = _hidden_states(builder, pieces, hidden)
    else:
        hidden = builder.op("Gather", [hidden, last], {"axis": 1}, dtype=FLOAT, shape=[1, count, dims(hidden)[-1]])
        hidden = exit_states(builder, pieces, at.layers, at.lens, hidden)
        last = _all_tokens(builder, last)
    weights, attributes = _weights_and_attributes(builder, pieces, at)
    return builder.ops(
        OP_LENS_CANDIDATE if attributes["lens"] else OP_CANDIDATE,
        [hidden, last, thresholds, *weights],
        attributes,
        domain=DOMAIN,
        types=[(FLOAT, [count, pieces.normalized_size]), (FLOAT, [count, 1]), (BOOL, [count, 1])],
    )


def _held_score(
    builder: GraphBuilder, pieces: Pieces, at: Checkpoint, states: ir.Value, last: ir.Value, thresholds: ir.Value
) -> list[ir.Value]:
    """Returns what `exit_state_and_score` does, the score from the last column of the states."""
    (count,), width = dims(last), pieces.carried_size
    states = builder.op("Gather", [states, last], {"axis": 1}, dtype=FLOAT, shape=[1, count, width])
    axis, score = builder.weights.integers("axis_0", [0]), columns(builder, states, width - 1, width)
    score = builder.op("Squeeze", [score, axis], dtype=FLOAT, shape=[count, 1])
    normalized = exit_states(builder, pieces, at.layers, at.lens, states)
    exit_state = builder.op("Squeeze", [normalized, axis], dtype=FLOAT, shape=[count, pieces.normalized_size])
    exits = builder.op("Greater", [score, thresholds], dtype=BOOL, shape=[count, 1])
    return [exit_state, score, exits]


def _all_tokens(builder: GraphBuilder, last: ir.Value) -> ir.Value:
    """Returns 0, 1, .. [m], for `last` [m]."""
    (count,) = shape = dims(last)
    if count == 1:
        return builder.weights.integers("first_token", [0])
    stop = builder.op("Size", [last], dtype=INT64, shape=[])
    zero, one = builder.weights.integers("zero", 0), builder.weights.integers("one", 1)
    return builder.op("Range", [zero, stop, one], dtype=INT64, shape=shape)


def exit_and_scatter(
    builder: GraphBuilder, pieces: Pieces, at: Checkpoint, hidden: ir.Value, inputs: Mapping[str, ir.Value]
) -> list[ir.Value]:
    """A checkpoint as one `TideExit`: exit states, score and exit flag (see `exit_op`).

    A final norm that `TideExit` has no form for comes before it, at the last tokens alone.

    Args:
        hidden: [B, S, W], the segment's result.
        inputs: last tokens, thresholds and exit states, by name.
    """
    last, thresholds, buffer = (inputs[name] for name in (names.LAST_TOKENS, names.THRESHOLDS, names.EXIT_STATES))
    if pieces.norm_alone:
        hidden = _hidden_states(builder, pieces, hidden)
    else:
        batch, axis = dims(last)[0], builder.weights.integers("axis_1", [1])
        index = builder.op("Unsqueeze", [last, axis], dtype=INT64, shape=[batch, 1])
        shape = [batch, dims(hidden)[-1]]
        one = builder.op("GatherND", [hidden, index], {"batch_dims": 1}, dtype=FLOAT, shape=shape)
        one = builder.op("Unsqueeze", [one, axis], dtype=FLOAT, shape=[batch, 1, shape[1]])
        hidden = exit_states(builder, pieces, at.layers, at.lens, one)
        last = builder.op("Sub", [last, last], dtype=INT64, shape=[batch])
    weights, attributes = _weights_and_attributes(builder, pieces, at)
    return builder.ops(
        OP_EXIT,
        [hidden, last, thresholds, buffer, *weights],
        attributes,
        domain=DOMAIN,
        types=[(FLOAT, dims(buffer)), (FLOAT, dims(last)), (INT32, dims(last))],
    )


def _hidden_states(builder: GraphBuilder, pieces: Pieces, hidden: ir.Value) -> ir.Value:
    """Returns the hidden states [B, m, D] in `hidden` [B, m, W], which may be wider."""
    return hidden if dims(hidden)[-1] == pieces.hidden_size else columns(builder, hidden, 0, pieces.hidden_size)


def columns(builder: GraphBuilder, hidden: ir.Value, start: int, stop: int) -> ir.Value:
    """Adds the columns from `start` to `stop` of `hidden` [B, m, W]."""
    ends = [builder.weights.integers(f"slice_{n}", [n]) for n in (start, stop, -1)]
    return builder.op("Slice", [hidden, *ends], dtype=FLOAT, shape=[*dims(hidden)[:2], stop - start])


def _weights_and_attributes(
    builder: GraphBuilder, pieces: Pieces, at: Checkpoint
) -> tuple[list[ir.Value], dict[str, str | float | int]]:
    """Returns the weights that a checkpoint's function reads after its hidden states, and its attributes.

    Lens and norm are among them only where the final norm is one operator; else they come before the function.
    """
    weights, lens, norm, epsilon = router_weights(builder, at.layers, at.router), None, "none", 0.0
    if pieces.norm_alone:
        (node,) = pieces.final_norm
        lens, norm, epsilon = at.lens, NORMS[node.op_type], node.attributes["epsilon"].as_float()
        weights += _lens_weights(builder, at.layers, lens) if lens is not None else []
        weights += [builder.weights.share(required(weight)) for weight in node.inputs[1:]]
    return weights, exit_attributes(norm, epsilon, lens is not None, at.router.shortlist is not None)


def router_weights(builder: GraphBuilder, layers: int, router: RouterArrays) -> list[ir.Value]:
    """Adds the weights of the router after `layers`, in the order of a checkpoint's inputs."""
    float32 = builder.weights.float32
    parts = {"down": router.down, "up": router.up, "bias": np.array([router.bias])}
    weights = [float32(f"routers.{layers}.{name}", array) for name, array in parts.items()]
    if router.shortlist is not None and router.confidence is not None:
        weights.append(float32("shortlist", router.shortlist))  # one for all routers
        weights.append(float32(f"routers.{layers}.confidence", router.confidence))
    return weights


def _lens_weights(builder: GraphBuilder, layers: int, lens: LensArrays) -> list[ir.Value]:
    parts = {"down": lens.down, "up": lens.up, "bias": lens.bias}
    return [builder.weights.float32(f"lenses.{layers}.{name}", array) for name, array in parts.items()]
