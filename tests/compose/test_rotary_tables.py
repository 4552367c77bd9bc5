"""Rotary angles of a position become a table; angles that depend on the length of the sequence are refused."""

import numpy as np
import onnx_ir as ir
import pytest

from tide_export.compose.cut import cut
from tide_export.compose.passes.rotary_tables import RotaryTablesPass
from tide_export.errors import UnsupportedModelError
from tide_export.trace.tracer import TracedModel

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def rotation(of_length: bool) -> ir.Model:
    """RotaryEmbedding by cos and sin of position_ids, divided by the longest of them if `of_length`."""
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([1, 2, "s", 2]))
    positions = ir.Value(name="position_ids", type=ir.TensorType(INT64), shape=ir.Shape([1, "s"]))
    tape = ir.tape.Tape()
    angle = tape.op("Cast", [tape.op("Unsqueeze", [positions, _axis(tape, 2)])], {"to": FLOAT.value})
    if of_length:
        longest = tape.op("ReduceMax", [angle, _axis(tape, 1)], {"keepdims": 1})
        one = tape.op("Constant", [], {"value": ir.tensor(np.array(1, dtype=np.float32))})
        angle = tape.op("Div", [angle, tape.op("Add", [longest, one])])
    rotated = tape.op("RotaryEmbedding", [x, tape.op("Cos", [angle]), tape.op("Sin", [angle])])
    rotated.name, rotated.type = "rotated", ir.TensorType(FLOAT)
    for number, node in enumerate(tape.nodes):
        node.name = f"n{number}"
        for value in node.outputs:
            value.name, value.type = value.name or f"v{number}", value.type or ir.TensorType(FLOAT)
    return ir.Model(ir.Graph([x, positions], [rotated], nodes=tape.nodes, opset_imports={"": 23}), ir_version=10)


def _axis(tape: ir.tape.Tape, axis: int) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(np.array([axis], dtype=np.int64))})


def test_angles_of_positions_become_a_table() -> None:
    model = rotation(of_length=False)
    assert RotaryTablesPass(9)(model).modified
    cos = next(value for name, value in model.graph.initializers.items() if "cos" in name)
    np.testing.assert_allclose(cos.const_value.numpy(), np.cos(np.arange(9, dtype=np.float32))[:, None], rtol=1e-6)


def test_angles_that_depend_on_the_length_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"depend on how long the sequence is"):
        cut(TracedModel(rotation(of_length=True), (0, 1)), 9)
