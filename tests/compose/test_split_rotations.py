"""Rotations whose cosines are scaled, chosen by sections, or of a part of a head: found, and no number changes."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common as common_passes

from tide_export.compose.passes.rotary_tables import RotaryTablesPass
from tide_export.compose.passes.split_rotations import SplitRotationsPass

HEADER = (
    '<ir_version: 10, opset_import: ["" : 23]> rotations (float[B, 2, S, 8] x, int64[B, S] position_ids)'
    " => (float[B, 2, S, 8] y)"
)
WEIGHTS = """float[2] two = {1.0, 0.3}, float[4] four = {1.0, 0.3, 0.1, 0.02}, float factor = {1.25},
    int64[1] none = {0}, int64[1] one = {1}, int64[1] last = {2}, int64[1] third = {3},
    int64[1] a = {2}, int64[1] b = {4}, int64[1] end = {9223372036854775807}, int64[2] swapped = {1, 0},
    int64[1] fourth = {4}, int64[2] pair = {1, 2}, int64[3] flat_8 = {0, 0, 8}, int64[4] heads_8 = {0, 0, 0, 8},
    int64[4] heads_4 = {0, 0, 0, 4}, int64[4] one_4 = {0, 0, 0, 4}"""
ANGLES = "column = Unsqueeze (position_ids, last)  number = Cast <to = 1> (column)  angles = Mul (number, {width})"
# Cosines and sines of one, which both halves share.
SCALED = "both = Concat <axis = -1> (angles, angles)  c0 = Cos (both)  s0 = Sin (both)" + (
    "  cos = Mul (c0, factor)  sin = Mul (s0, factor)"
)
CHOSEN = """c0 = Cos (angles)  s0 = Sin (angles)
    c1 = Gather <axis = 2> (c0, swapped)  s1 = Gather <axis = 2> (s0, swapped)
    cos = Concat <axis = -1> (c1, c1)  sin = Concat <axis = -1> (s1, s1)"""
ROTATE = """cos_4d = Unsqueeze (cos, one)  sin_4d = Unsqueeze (sin, one)
    first = Slice ({x}, none, {half}, third, one)  second = Slice ({x}, {half}, end, third, one)
    minus = Neg (second)  turned = Concat <axis = -1> (minus, first)
    kept = Mul ({x}, cos_4d)  moved = Mul (turned, sin_4d)  {y} = Add (kept, moved)"""
PART = f"""part = Slice (x, none, b, third, one)  rest = Slice (x, b, end, third, one)
    {ROTATE.format(x="part", half="a", y="rotated")}  y = Concat <axis = -1> (rotated, rest)"""


def model_of(body: str) -> ir.Model:
    parsed = onnx.parser.parse_model(f"{HEADER} <{WEIGHTS}> {{ {body} }}")
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(parsed))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
    return model


def run(model: ir.Model) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((2, 2, 5, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])
    return ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x, "position_ids": positions})[0]


WHOLE = ROTATE.format(x="x", half="b", y="y")
HALVES = """c0 = Cos (angles)  s0 = Sin (angles)  cos = Mul (c0, factor)  sin = Mul (s0, factor)
    cos_4d = Unsqueeze (cos, one)  sin_4d = Unsqueeze (sin, one)
    first, second = Split <axis = -1, num_outputs = 2> (x)
    a0 = Mul (first, cos_4d)  a1 = Mul (second, sin_4d)  left = Sub (a0, a1)
    b0 = Mul (second, cos_4d)  b1 = Mul (first, sin_4d)  right = Add (b0, b1)
    y = Concat <axis = -1> (left, right)"""
TURN = """first = Slice ({x}, none, end, third, last)  second = Slice ({x}, one, end, third, last)
    minus = Neg (second)  minus_5d = Unsqueeze (minus, fourth)  first_5d = Unsqueeze (first, fourth)
    pairs = Concat <axis = -1> (minus_5d, first_5d)  turned = Reshape (pairs, {shape})
    kept = Mul ({x}, cos_4d)  moved = Mul (turned, sin_4d)  {y} = Add (kept, moved)"""
# As Cohere repeats its angles, and as GLM repeats cosines.
NEIGHBOURS = f"""each = Unsqueeze (angles, third)  twice = Expand (each, pair)  both = Reshape (twice, flat_8)
    c0 = Cos (both)  s0 = Sin (both)  cos_4d = Unsqueeze (c0, one)  sin_4d = Unsqueeze (s0, one)
    {TURN.format(x="x", y="y", shape="heads_8")}"""
PART_OF_NEIGHBOURS = f"""c0 = Cos (angles)  s0 = Sin (angles)  c1 = Unsqueeze (c0, one)  s1 = Unsqueeze (s0, one)
    c2 = Unsqueeze (c1, fourth)  c3 = Expand (c2, pair)  cos_4d = Reshape (c3, one_4)
    s2 = Unsqueeze (s1, fourth)  s3 = Expand (s2, pair)  sin_4d = Reshape (s3, one_4)
    part = Slice (x, none, b, third, one)  rest = Slice (x, b, end, third, one)
    {TURN.format(x="part", y="rotated", shape="heads_4")}  y = Concat <axis = -1> (rotated, rest)"""
FOUND = {
    "neighbours": (ANGLES.format(width="four") + NEIGHBOURS, 0),
    "neighbours, of a part": (ANGLES.format(width="two") + PART_OF_NEIGHBOURS, 4),
    "half by half": (ANGLES.format(width="four") + HALVES, 0),
    "scaled": (ANGLES.format(width="four") + SCALED + WHOLE, 0),
    "chosen by sections, of a part": (ANGLES.format(width="two") + CHOSEN + PART, 4),
}


@pytest.mark.parametrize(("body", "part"), FOUND.values(), ids=FOUND)
def test_a_rotation_becomes_one_node_with_tables(body: str, part: int) -> None:
    before, model = run(model_of(body)), model_of(body)
    assert SplitRotationsPass()(model).modified
    np.testing.assert_allclose(run(model), before, atol=1e-6)
    RotaryTablesPass(9)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    (node,) = model.graph
    assert (node.op_type, node.attributes.get_int("rotary_embedding_dim", 0)) == ("RotaryEmbedding", part)
    assert [list(value.shape) for value in node.inputs[1:3]] == [[9, (part or 8) // 2]] * 2
    np.testing.assert_allclose(run(model), before, atol=1e-6)


def test_heads_after_the_tokens_are_swapped_once() -> None:
    """As Gemma 4 has them: it swaps them after the rotation, for attention."""
    turned = ROTATE.format(x="late", half="b", y="rotated").replace("Unsqueeze (cos, one)", "Unsqueeze (cos, last)")
    turned = turned.replace("Unsqueeze (sin, one)", "Unsqueeze (sin, last)")
    body = f"""{ANGLES.format(width="four")}{SCALED}  late = Transpose <perm = [0, 2, 1, 3]> (x)
        {turned}  early = Transpose <perm = [0, 2, 1, 3]> (rotated)  y = Neg (early)"""
    before, model = run(model_of(body)), model_of(body)
    assert SplitRotationsPass()(model).modified
    RotaryTablesPass(9)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph] == ["RotaryEmbedding", "Neg"]
    assert model.graph[0].outputs[0].shape == model.graph.inputs[0].shape
    np.testing.assert_allclose(run(model), before, atol=1e-6)


def test_two_rotations_share_their_tables() -> None:
    both = ROTATE.format(x="x", half="b", y="query")
    other = both.replace("cos_4d = Unsqueeze (cos, one)  sin_4d = Unsqueeze (sin, one)", "doubled = Add (x, x)")
    for name in ("first", "second", "minus", "turned", "kept", "moved", "query"):
        other = other.replace(name, f"{name}_2")
    other = other.replace("Slice (x", "Slice (doubled").replace("Mul (x", "Mul (doubled")
    body = f"{ANGLES.format(width='four')}{SCALED}{both}  {other}  y = Add (query, query_2)"
    before, model = run(model_of(body)), model_of(body)
    SplitRotationsPass()(model)
    RotaryTablesPass(9)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    assert sorted(node.op_type for node in model.graph) == ["Add", "Add", "RotaryEmbedding", "RotaryEmbedding"]
    assert len(model.graph.initializers) == 2
    np.testing.assert_allclose(run(model), before, atol=1e-6)


def test_cosines_of_another_width_are_left() -> None:
    """One for all numbers of a half, broadcast."""
    body = ANGLES.format(width="factor") + HALVES
    before, model = run(model_of(body)), model_of(body)
    assert not SplitRotationsPass()(model).modified
    np.testing.assert_array_equal(run(model), before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("second = Slice (x, one, end, third, last)", "second = Slice (x, none, end, third, last)"),
        ("both = Reshape (twice, flat_8)", "both = Concat <axis = -1> (angles, angles)"),
    ],
    ids=["the same number twice", "cosines by halves"],
)
def test_other_neighbours_are_left(before: str, after: str) -> None:
    assert before in NEIGHBOURS
    body = ANGLES.format(width="four") + NEIGHBOURS.replace(before, after)
    expected, model = run(model_of(body)), model_of(body)
    assert not SplitRotationsPass()(model).modified
    np.testing.assert_array_equal(run(model), expected)


def test_halves_that_differ_are_left() -> None:
    other = "both = Concat <axis = -1> (angles, slower)"
    angles = ANGLES.format(width="four") + "  slower = Mul (angles, factor)"
    body = angles + SCALED.replace("both = Concat <axis = -1> (angles, angles)", other) + WHOLE
    before, model = run(model_of(body)), model_of(body)
    assert not SplitRotationsPass()(model).modified
    np.testing.assert_array_equal(run(model), before)
