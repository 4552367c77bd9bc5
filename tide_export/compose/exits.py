"""Adds what a checkpoint computes to a block: the state that the head reads should a token exit, and the router on it.

The step graph and the segment networks share these functions, so that both exit by the same arithmetic.
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block
from tide_export.compose.cut import Pieces
from tide_export.compose.router_op import route_attributes
from tide_export.routers.router import LensArrays, RouterArrays
from tide_export.trace.rewriting import BOOL, FLOAT, dims


def route(
    block: Block, layers: int, router: RouterArrays, state: ir.Value, threshold: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The router of the checkpoint after `layers` on exit states [B, 1, D'] or [B, D']: its score, and whether that is
    above `threshold` [1], both [B, 1, 1] or [B, 1]."""
    float32 = block.weights.float32
    parts = {"down": router.down, "up": router.up, "bias": np.array([router.bias])}
    weights = [float32(f"routers.{layers}.{name}", array) for name, array in parts.items()]
    if router.shortlist is not None and router.confidence is not None:
        weights.append(float32("shortlist", router.shortlist))  # one for all routers
        weights.append(float32(f"routers.{layers}.confidence", router.confidence))
    shape = [*dims(state)[:-1], 1]
    score, exits = block.ops(
        names.OP_ROUTE,
        [state, threshold, *weights],
        route_attributes(),
        domain=names.DOMAIN,
        types=[(FLOAT, shape), (BOOL, shape)],
    )
    return score, exits


def exit_states(block: Block, pieces: Pieces, layers: int, lens: LensArrays | None, states: ir.Value) -> ir.Value:
    """The hidden states in `states` [B, m, W] or [B, m, D] through the lens, if there is one, and the final norm: what
    the head reads, [B, m, D']."""
    batch, tokens, width = dims(states)
    shape = [batch, tokens, pieces.hidden_size]
    if width != pieces.hidden_size:
        start, stop, axis = (block.weights.integers(f"slice_{n}", [n]) for n in (0, pieces.hidden_size, -1))
        states = block.op("Slice", [states, start, stop, axis], dtype=FLOAT, shape=shape)
    if lens is not None:
        down, up, bias = (
            block.weights.float32(f"lenses.{layers}.{name}", array)
            for name, array in (("down", lens.down), ("up", lens.up), ("bias", lens.bias))
        )
        low = block.op("MatMul", [states, down], dtype=FLOAT, shape=[batch, tokens, lens.down.shape[1]])
        change = block.op("MatMul", [low, up], dtype=FLOAT, shape=shape)
        change = block.op("Add", [change, bias], dtype=FLOAT, shape=shape)
        states = block.op("Add", [states, change], dtype=FLOAT, shape=shape)
    (normalized,) = block.inline(pieces.final_norm, [states], batch, tokens)
    return normalized
