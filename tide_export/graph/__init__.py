"""Third stage: the traced graph is cut at its markers and composed into one graph with an `If` per segment."""

from tide_export.graph.compose import compose
from tide_export.graph.cut import Pieces, cut
from tide_export.graph.propagate import compose_propagating

__all__ = ["Pieces", "compose", "compose_propagating", "cut"]
