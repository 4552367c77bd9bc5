"""Rewrites of the traced graph, before it is cut; standard ONNX in, standard ONNX out. One pass a file."""

from tide_export.graph.passes.masked_fills import MaskedFillsPass
from tide_export.graph.passes.rotary_tables import RotaryTablesPass
from tide_export.graph.passes.static_reshapes import StaticReshapesPass

__all__ = ["MaskedFillsPass", "RotaryTablesPass", "StaticReshapesPass"]
