"""Composes the graph of `kv_cache_strategy = "propagate"`: a skipped layer gets keys and values from the exit state.

The other way to skip. `compose` lets a token that left wait, so that every key and value is exact; here the layers
behind the exit write the keys and values they would have if their input were the state the token left with, and nothing
waits or is caught up. Each step is done when it ends, but the cache is no longer the full model's: later tokens see a
state that stood still. This is what CALM (Schuster et al. 2022, arXiv 2207.07061, "hidden-state propagation") and most
early-exit systems do. `oracle` has the same rule in eager PyTorch.

A step of several tokens (a prompt) must run every segment; the caller sees to it by its thresholds.
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block
from tide_export.compose.cut import Pieces, is_attention
from tide_export.compose.exits import token_dims
from tide_export.compose.step_graph import Composer, LensWeights, RouterWeights, check_routers
from tide_export.errors import GraphError

FLOAT = ir.DataType.FLOAT


def compose_propagating(pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None) -> ir.Model:
    """The step graph: as `compose`'s, without `pending_states` inputs and without the output `new_pending_states`.

    Args:
        pieces: of a trace with markers in front of every layer.

    Raises:
        GraphError: as `compose`; the pieces lack the layers' keys and values.
    """
    check_routers(pieces, routers, lenses)
    if len(pieces.keys_values) != pieces.boundaries[-1]:
        raise GraphError("to propagate keys and values the model must be traced with markers in front of every layer")
    return _Propagating(pieces, routers, lenses or {}).compose()


class _Propagating(Composer):
    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights):
        super().__init__(pieces, routers, lenses)
        self.pending = {}
        self.attention = {
            node.attributes["layer"].as_int(): node for piece in pieces.segments for node in piece if is_attention(node)
        }

    def _waiting(self, block: Block, k: int, y: ir.Value) -> ir.Value:
        """Nothing waits: what segment k gets is what the one before gave, and what a token that left is left with."""
        return y

    def _skipped(self, block: Block, k: int, layer: int, waiting: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Writes one token's key and value from the exit state, by an attention whose own result nobody reads.

        No operator but attention writes into a K/V buffer in place. Its query is zero, and it has no more heads than
        there are keys.
        """
        tokens = f"waiting_{k}"
        piece = self.pieces.keys_values[layer]
        positions = self._positions_of(block, waiting, tokens)
        key, value = block.inline(piece, [waiting, positions], token_dims(piece, 1, tokens))
        kv_heads, head_dim = self.pieces.kv_shapes[layer]
        zeros = np.zeros((1, kv_heads, 1, head_dim), dtype=np.float32)
        query = self.weights.constant(f"no_query_{kv_heads}_{head_dim}", zeros)
        rotation = key.producer()
        if rotation is not None and rotation.op_type == "RotaryEmbedding":  # so that the key's can be fused
            query = block.op(
                "RotaryEmbedding",
                [query, *rotation.inputs[1:]],
                dict(rotation.attributes),
                dtype=FLOAT,
                shape=zeros.shape,
            )
        buffers = [self.past[layer, kind] for kind in ("key", "value")]
        attributes = dict(self.attention[layer].attributes) | {"num_heads": ir.AttrInt64("num_heads", kv_heads)}
        _, *presents = block.ops(
            names.OP_ATTENTION,
            [query, key, value, *buffers, self.total],
            attributes,
            domain=names.DOMAIN,
            types=[(FLOAT, [1, 1, kv_heads, head_dim]), *((FLOAT, buffer.shape) for buffer in buffers)],
        )
        return presents[0], presents[1]
