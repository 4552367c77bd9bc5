"""Composes the step graph of `kv_cache_strategy = "propagate"`.

Skipped layers get K/V from the exit state.

`step_graph` keeps a token that exited pending, so that every key and value is exact. Here the layers after the exit
write the keys and values they would have if their input were the state the token exited with: nothing is pending and
nothing is caught up. Each step is complete when it ends, but the cache is no longer the full model's: later tokens see
a frozen hidden state. CALM (Schuster et al. 2022, arXiv 2207.07061, "hidden-state propagation") and most early-exit
systems do this. `verify.oracle` has the same rule in eager PyTorch.

A step of several tokens (a prompt) must run every segment; the caller sets its thresholds so.
"""

import onnx_ir as ir

from tide_export.compose.cut import Pieces
from tide_export.compose.kv_cache import Cache, store_from
from tide_export.compose.step_graph import Composer, LensWeights, RouterWeights, check_routers
from tide_export.errors import GraphError
from tide_export.graph.builder import GraphBuilder


def compose_propagating(pieces: Pieces, routers: RouterWeights, lenses: LensWeights | None = None) -> ir.Model:
    """Composes the step graph without pending states, as inputs or as an output.

    Args:
        pieces: of a trace with a marker before every layer.

    Raises:
        GraphError: as `compose`; or the pieces lack the layers' keys and values.
    """
    check_routers(pieces, routers, lenses)
    if set(pieces.keys_values) != set(pieces.kv_caches):
        raise GraphError("to propagate keys and values the model must be traced with markers before every layer")
    return _Propagating(pieces, routers, lenses or {}).compose()


class _Propagating(Composer):
    def __init__(self, pieces: Pieces, routers: RouterWeights, lenses: LensWeights):
        super().__init__(pieces, routers, lenses)
        self.pending = {}

    def _pending(self, builder: GraphBuilder, k: int, y: ir.Value) -> ir.Value:
        """Segment k reads what the one before gave; a token that exited keeps that state.

        Its tokens get segment k's name for them: additions of states with two names would not fuse with norms.
        """
        y.shape = ir.Shape([1, f"pending_{k}", self.pieces.state_size])
        return y

    def _skipped(self, builder: GraphBuilder, k: int, layer: int, pending: ir.Value) -> Cache:
        """The pages with the token's key and value, computed from the exit state."""
        tokens = f"pending_{k}"
        states = [pending, self._positions_of(builder, pending, tokens)]
        return store_from(builder, self.pieces, layer, states, tokens, self.pages, self.places)
