"""Computes, for one step, the attention biases by key position (ALiBi) from the trace's tables.

A trace holds a table [H, N]: the bias of each head at each key position. A step over n tokens of a sequence of T adds
its first T columns to every row of scores, relative to the last one: that does not change a row's softmax, and numbers
that are small near the query lose nothing to rounding.
"""

import onnx_ir as ir

from tide_export.compose.builder import Block
from tide_export.compose.cut import Pieces, is_attention, sinks_and_bias
from tide_export.trace.rewriting import FLOAT, INT64, dims


def relative_biases(block: Block, pieces: Pieces, total: ir.Value) -> dict[str, ir.Value]:
    """For every table of the model, by name, the bias [1, H, 1, T] of a sequence of `total` (int32 []) tokens."""
    biases: dict[str, ir.Value] = {}
    integers = block.weights.integers
    for name, table in (item for piece in pieces.segments for item in _tables(piece).items()):
        if name in biases:
            continue
        heads = dims(table)[0]
        stop = block.op("Cast", [total], {"to": INT64.value}, dtype=INT64, shape=[])
        stop = block.op("Reshape", [stop, integers("shape_1", [1])], dtype=INT64, shape=[1])
        one, zero = integers("axis_1", [1]), integers("axis_0", [0])
        before_last = block.op("Sub", [stop, one], dtype=INT64, shape=[1])
        shared = block.weights.share(table)
        keys = block.op("Slice", [shared, zero, stop, one], dtype=FLOAT, shape=[heads, "total_length"])
        last = block.op("Slice", [shared, before_last, stop, one], dtype=FLOAT, shape=[heads, 1])
        relative = block.op("Sub", [keys, last], dtype=FLOAT, shape=[heads, "total_length"])
        axes = integers("axes_0_2", [0, 2])
        biases[name] = block.op("Unsqueeze", [relative, axes], dtype=FLOAT, shape=[1, heads, 1, "total_length"])
    return biases


def step_biases(
    block: Block, piece: ir.Graph, relative: dict[str, ir.Value], x: ir.Value, tokens: str
) -> dict[str, ir.Value]:
    """For every table of `piece`, by name, the bias [1, H, n, T] of a step over x [1, n, D]."""
    biases: dict[str, ir.Value] = {}
    for name, table in _tables(piece).items():
        one = block.weights.integers("axis_1", [1])
        count = block.op("Shape", [x], {"start": 1, "end": 2}, dtype=INT64, shape=[1])
        repeats = block.op("Concat", [one, one, count, one], {"axis": 0}, dtype=INT64, shape=[4])
        shape = [1, dims(table)[0], tokens, "total_length"]
        biases[name] = block.op("Expand", [relative[name], repeats], dtype=FLOAT, shape=shape)
    return biases


def _tables(piece: ir.Graph) -> dict[str, ir.Value]:
    biases = [sinks_and_bias(node)[1] for node in piece if is_attention(node)]
    return {str(table.name): table for table in biases if table is not None}
