"""Attention biases by key position (ALiBi): from the trace's tables to what is added to the scores of one step.

Used by `compose`. A trace holds a table [H, N], the bias of each head at each key position. A step over n tokens of a
sequence of T adds its first T columns to every row of scores. They are taken relative to the last one: a row's softmax
does not change by it, and numbers that stay small near the query lose nothing to rounding.
"""

import numpy as np
import onnx_ir as ir

from tide_export.compose.builder import Block
from tide_export.compose.cut import Pieces, bias_table, is_attention

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def relative_biases(block: Block, pieces: Pieces, total: ir.Value) -> dict[str, ir.Value]:
    """For every table of the model, by name, the bias [1, H, 1, T] of a sequence of `total` (int32 []) tokens."""
    biases: dict[str, ir.Value] = {}
    for table in [table for piece in pieces.segments for table in _tables(piece)]:
        name = str(table.name)
        if name in biases:
            continue
        assert table.shape is not None
        heads = table.shape[0]
        stop = block.op("Cast", [total], {"to": INT64.value}, dtype=INT64, shape=[])
        stop = block.op("Reshape", [stop, _numbers(block, "shape_1", [1])], dtype=INT64, shape=[1])
        one, zero = _numbers(block, "axis_1", [1]), _numbers(block, "axis_0", [0])
        before_last = block.op("Sub", [stop, one], dtype=INT64, shape=[1])
        shared = block.weights.share(table)
        keys = block.op("Slice", [shared, zero, stop, one], dtype=FLOAT, shape=[heads, "total_length"])
        last = block.op("Slice", [shared, before_last, stop, one], dtype=FLOAT, shape=[heads, 1])
        relative = block.op("Sub", [keys, last], dtype=FLOAT, shape=[heads, "total_length"])
        axes = _numbers(block, "axes_0_2", [0, 2])
        biases[name] = block.op("Unsqueeze", [relative, axes], dtype=FLOAT, shape=[1, heads, 1, "total_length"])
    return biases


def step_biases(
    block: Block, piece: ir.Graph, relative: dict[str, ir.Value], x: ir.Value, tokens: str
) -> dict[str, ir.Value]:
    """For every table of `piece`, by name, the bias [1, H, n, T] of a step over x [1, n, D]."""
    biases: dict[str, ir.Value] = {}
    for table in _tables(piece):
        name = str(table.name)
        if name in biases:
            continue
        one = _numbers(block, "axis_1", [1])
        count = block.op("Shape", [x], {"start": 1, "end": 2}, dtype=INT64, shape=[1])
        rows = block.op("Concat", [one, one, count, one], {"axis": 0}, dtype=INT64, shape=[4])
        assert table.shape is not None
        shape = [1, table.shape[0], tokens, "total_length"]
        biases[name] = block.op("Expand", [relative[name], rows], dtype=FLOAT, shape=shape)
    return biases


def _tables(piece: ir.Graph) -> list[ir.Value]:
    tables = [bias_table(node) for node in piece if is_attention(node)]
    return [table for table in tables if table is not None]


def _numbers(block: Block, name: str, numbers: list[int]) -> ir.Value:
    return block.weights.constant(name, np.array(numbers, dtype=np.int64))
