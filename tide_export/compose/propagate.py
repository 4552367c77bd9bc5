"""Composes the step graph of `kv_cache_strategy = "propagate"`: skipped layers get K/V from the exit state.

`step_graph` keeps a token that exited pending, so that every key and value is exact. Here the layers after the exit
write the keys and values they would have if their input were the state the token exited with: nothing is pending and
nothing is caught up. Each step is complete when it ends, but the cache is no longer the full model's: later tokens see
a frozen hidden state. CALM (Schuster et al. 2022, arXiv 2207.07061, "hidden-state propagation") and most early-exit
systems do this. `verify.oracle` has the same rule in eager PyTorch.

A step of several tokens (a prompt) must run every segment; the caller sets its thresholds so.
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block
from tide_export.compose.cut import Pieces, is_attention, layer_of
from tide_export.compose.step_graph import Composer, LensWeights, RouterWeights, check_routers
from tide_export.errors import GraphError
from tide_export.trace.rewriting import FLOAT


def compose_propagating(pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None) -> ir.Model:
    """The step graph of `compose`, without `pending_states` inputs and without the output `new_pending_states`.

    Args:
        pieces: of a trace with a marker before every layer.

    Raises:
        GraphError: as `compose`; or the pieces lack the layers' keys and values.
    """
    check_routers(pieces, routers, lenses)
    if set(pieces.keys_values) != set(pieces.kv_layers):
        raise GraphError("to propagate keys and values the model must be traced with markers before every layer")
    return _Propagating(pieces, routers, lenses or {}).compose()


class _Propagating(Composer):
    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights):
        super().__init__(pieces, routers, lenses)
        self.pending = {}
        self.attention = {layer_of(node): node for piece in pieces.segments for node in piece if is_attention(node)}

    def _pending(self, block: Block, k: int, y: ir.Value) -> ir.Value:
        """Segment k reads what the one before gave; a token that exited keeps that state."""
        return y

    def _skipped(self, block: Block, k: int, layer: int, pending: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Writes one token's key and value, computed from the exit state, by an attention whose result is unused.

        No operator but attention writes into a K/V buffer in place. Its query is zero, with as many heads as the keys.
        """
        tokens = f"pending_{k}"
        piece = self.pieces.keys_values[layer]
        positions = self._positions_of(block, pending, tokens)
        key, value = block.inline(piece, [pending, positions], 1, tokens)
        kv_heads, head_dim = self.pieces.kv_shapes[layer]
        zeros = np.zeros((1, kv_heads, 1, head_dim), dtype=np.float32)
        query = self.weights.constant(f"no_query_{kv_heads}_{head_dim}", zeros)
        rotation = key.producer()
        if rotation is not None and rotation.op_type == "RotaryEmbedding":  # so that the key's can be fused
            inputs, attributes = [query, *rotation.inputs[1:]], dict(rotation.attributes)
            query = block.op("RotaryEmbedding", inputs, attributes, dtype=FLOAT, shape=zeros.shape)
        buffers = [self.past[layer, kind] for kind in ("key", "value")]
        attributes = dict(self.attention[layer].attributes) | {"num_heads": ir.AttrInt64("num_heads", kv_heads)}
        _, *presents = block.ops(
            names.OP_ATTENTION,
            [query, key, value, *buffers, self.total, None, None],
            attributes,
            domain=names.DOMAIN,
            types=[(FLOAT, [1, 1, kv_heads, head_dim]), *((FLOAT, buffer.shape) for buffer in buffers)],
        )
        return presents[0], presents[1]
