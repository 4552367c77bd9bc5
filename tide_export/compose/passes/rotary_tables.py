"""Replaces cosines and sines computed from position_ids by tables of every position.

Runs on the trace before it is cut. `RotaryEmbedding(x, cos, sin)` becomes `RotaryEmbedding(x, cos_cache, sin_cache,
position_ids)` (both forms are ONNX opset 23), so that every segment rotates at its own positions and ONNX Runtime can
do it inside attention. The traced nodes themselves are evaluated, so the tables hold whatever scaling the model applies
(NTK, llama3, yarn). Angles that depend on more than positions remain. Equal tables are stored once if common
subexpressions are merged before.
"""

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience as irc
from onnx.reference import ReferenceEvaluator

from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import constant, nodes_of, required


class RotaryTablesPass(ir.passes.InPlacePass):
    def __init__(self, max_length: int):
        """`max_length`: rows of the tables, the longest sequence the graph will run on."""
        super().__init__()
        self.max_length = max_length

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        positions = next(value for value in graph.inputs if value.name == "position_ids")
        tables: dict[ir.Value, ir.Value | None] = {}
        modified = False
        for node in nodes_of(graph, "RotaryEmbedding"):
            if len(node.inputs) != 3:
                continue
            cos, sin = map(required, node.inputs[1:])
            for value, kind in ((cos, "cos"), (sin, "sin")):
                if value not in tables:
                    tables[value] = self._table(graph, positions, value, f"rotary.{kind}_cache.{len(tables) // 2}")
            if tables[cos] is None or tables[sin] is None:
                continue
            node.resize_inputs(4)
            for index, table in enumerate((tables[cos], tables[sin], positions), start=1):
                node.replace_input_with(index, table)
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def _table(self, graph: ir.Graph, positions: ir.Value, value: ir.Value, name: str) -> ir.Value | None:
        """The table [max_length, Dh/2] of `value` [B, S, Dh/2], or None if it depends on more than positions."""
        try:
            angles = irc.extract(graph, [positions], [value])
        except ValueError:
            return None
        angles.outputs[0].type = value.type or ir.TensorType(ir.DataType.FLOAT)
        evaluator = ReferenceEvaluator(ir.serde.serialize_model(ir.Model(angles, ir_version=10)))
        runs = [
            evaluator.run(None, {"position_ids": np.arange(length, dtype=np.int64)[None]})
            for length in (self.max_length, min(2, self.max_length))
        ]
        rows, few = (np.asarray(output) for (output,) in runs)
        if not np.array_equal(rows[:, : few.shape[1]], few, equal_nan=True):
            raise UnsupportedModelError(
                f"the rotary angles of a token depend on how long the sequence is ({value.name}), so keys in the cache "
                "would go out of date: the model cannot be exported"
            )
        return constant(graph, name, np.ascontiguousarray(rows[0]))
