"""Makes segments carry each token's cumulative exit probability in the last column of its state.

For routers whose score is that of an exit at their checkpoint or before (`RouterSet.cumulative`): after a segment,
share + (1 - share) * p, where p is what the router gives. Before the first checkpoint the share is 0.
"""

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from tide_export.compose.cut import Pieces
from tide_export.compose.exits import columns, exit_states, router_weights
from tide_export.compose.step_graph import RouterWeights, check_routers
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT64, dims, static_dim, typed_value
from tide_export.routers.router import RouterArrays


def with_exit_shares(pieces: Pieces, routers: RouterWeights) -> Pieces:
    """Returns `pieces` whose segments take and give states [B, S, W + 1]; the last one gives what it gave.

    Raises:
        GraphError: a router is missing or has another width.
    """
    check_routers(pieces, routers, None)
    segments = tuple(_segment(pieces, k, routers) for k in range(len(pieces.segments)))
    return replace(pieces, segments=segments, exit_shares=True)


def _segment(pieces: Pieces, k: int, routers: RouterWeights) -> ir.Graph:
    piece, layers = pieces.segments[k], pieces.boundaries[k + 1]
    builder = GraphBuilder(f"shares_{k}", Weights())
    (batch, tokens, _), width = dims(piece.inputs[0]), static_dim(piece.inputs[0], -1)
    states = typed_value("states", FLOAT, [batch, tokens, width + (k > 0)])
    positions = typed_value("positions", INT64, dims(piece.inputs[1]))
    inner = columns(builder, states, 0, width) if k else states
    y, *tapped = builder.inline(piece, [inner, positions], batch, tokens)
    if k + 1 < len(pieces.segments):
        normalized = exit_states(builder, pieces, layers, None, y)
        share = _probability(builder, layers, routers[layers], normalized)
        if k:
            before, whole = columns(builder, states, width, width + 1), builder.weights.float32("whole", np.ones(1))
            left = builder.op("Sub", [whole, before], dtype=FLOAT, shape=dims(before))
            share = builder.op("Mul", [left, share], dtype=FLOAT, shape=dims(before))
            share = builder.op("Add", [before, share], dtype=FLOAT, shape=dims(before))
        shape = [batch, tokens, static_dim(y, -1) + 1]
        y = builder.op("Concat", [y, share], {"axis": -1}, dtype=FLOAT, shape=shape)
    weights = list(builder.weights.values.values())
    return ir.Graph([states, positions], [y, *tapped], nodes=builder.nodes, initializers=weights, name=builder.prefix)


def _probability(builder: GraphBuilder, layers: int, router: RouterArrays, normalized: ir.Value) -> ir.Value:
    """Adds the router on normalized states [B, S, D']: returns what it gives, [B, S, 1]."""
    down, up, bias = router_weights(builder, layers, router)
    hidden, one = [*dims(normalized)[:2], router.down.shape[1]], [*dims(normalized)[:2], 1]
    z = builder.op("MatMul", [normalized, down], dtype=FLOAT, shape=hidden)
    z = builder.op("Mul", [z, builder.op("Sigmoid", [z], dtype=FLOAT, shape=hidden)], dtype=FLOAT, shape=hidden)
    z = builder.op("Add", [builder.op("MatMul", [z, up], dtype=FLOAT, shape=one), bias], dtype=FLOAT, shape=one)
    return builder.op("Sigmoid", [z], dtype=FLOAT, shape=one)
