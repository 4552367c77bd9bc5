"""What stands at a checkpoint, written into a block: the state a token would leave with, and the router's say on it.

`compose` puts these behind every segment of the one branched graph, `lower.tensorrt.lower` behind every network of its
own, so that both exit by the same arithmetic.
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block, Weights
from tide_export.compose.cut import Pieces
from tide_export.compose.router_op import route_attributes
from tide_export.routers.router import LensArrays, RouterArrays

FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


def route(
    block: Block, layers: int, router: RouterArrays, candidate: ir.Value, threshold: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The router of the checkpoint after `layers` on a candidate [B, 1, D'] or [B, D']: its score and whether that is
    above `threshold` [1], both [B, 1, 1] or [B, 1]."""
    parts = {"down": router.down, "up": router.up, "bias": np.array([router.bias])}
    weights = [float_weight(block.weights, f"routers.{layers}.{name}", array) for name, array in parts.items()]
    if router.shortlist is not None and router.confidence is not None:
        weights.append(float_weight(block.weights, "shortlist", router.shortlist))  # one for all routers
        weights.append(float_weight(block.weights, f"routers.{layers}.confidence", router.confidence))
    assert candidate.shape is not None
    shape = [*candidate.shape[:-1], 1]
    score, leaves = block.ops(
        names.OP_ROUTE,
        [candidate, threshold, *weights],
        route_attributes(),
        domain=names.DOMAIN,
        types=[(FLOAT, shape), (BOOL, shape)],
    )
    return score, leaves


def leaving_state(block: Block, pieces: Pieces, layers: int, lens: LensArrays | None, state: ir.Value) -> ir.Value:
    """`state` [B, m, D] through the lens, where there is one, and the tail: what the head sees, [B, m, D']."""
    assert state.shape is not None
    if lens is not None:
        down, up, bias = (
            float_weight(block.weights, f"lenses.{layers}.{name}", array)
            for name, array in (("down", lens.down), ("up", lens.up), ("bias", lens.bias))
        )
        low = block.op("MatMul", [state, down], dtype=FLOAT, shape=[*state.shape[:2], lens.down.shape[1]])
        moved = block.op("MatMul", [low, up], dtype=FLOAT, shape=state.shape)
        moved = block.op("Add", [moved, bias], dtype=FLOAT, shape=state.shape)
        state = block.op("Add", [state, moved], dtype=FLOAT, shape=state.shape)
    assert state.shape is not None
    (normed,) = block.inline(pieces.tail, [state], token_dims(pieces.tail, state.shape[0], state.shape[1]))
    return normed


def float_weight(weights: Weights, name: str, array: np.ndarray) -> ir.Value:
    """A float32 initializer."""
    return weights.constant(name, np.ascontiguousarray(array, dtype=np.float32))


def token_dims(piece: ir.Graph, batch: object, tokens: object) -> dict[str, int | str | None]:
    """How the piece's symbolic batch and token dimensions are called where it is put to use."""
    shape = piece.inputs[0].shape
    assert shape is not None
    renamed: dict[str, int | str | None] = {}
    for dim, to in ((shape[0], batch), (shape[1], tokens)):
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            renamed[dim.value] = to.value if isinstance(to, ir.SymbolicDim) else to  # type: ignore[assignment]
    return renamed
