"""An RMS norm of states less their mean is a layer norm, and one without a weight gets ones; others stay."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common as common_passes

from tide_export.compose.passes.norms import NormsPass

HEADER = (
    '<ir_version: 10, opset_import: ["" : 23]> norms (float[2, s, 8] x, float[2, s, 8] other) => (float[2, s, 8] y)'
)
NORM = """mean = ReduceMean (x, last)  difference = Sub (x, mean)
    y = RMSNormalization <axis = -1, epsilon = 0.01> (difference, weight)"""
WEIGHTS = """float[8] weight = {1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 1.0, -1.0}, int64[1] last = {-1}, int64[1] tokens = {1},
    float two = {2.0}, float epsilon = {0.01}"""


def model_of(body: str) -> ir.Model:
    parsed = onnx.parser.parse_model(f"{HEADER} <{WEIGHTS}> {{ {body} }}")
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(parsed))


def run(model: ir.Model) -> np.ndarray:
    x, other = np.random.default_rng(0).standard_normal((2, 2, 5, 8)).astype(np.float32) + 3
    return ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x, "other": other})[0]


BARE = """squares = Pow (x, two)  mean = ReduceMean (squares, last)  total = Add (mean, epsilon)
    root = Sqrt (total)  inverse = Reciprocal (root)  y = Mul (x, inverse)"""


@pytest.mark.parametrize("order", ["(x, inverse)", "(inverse, x)"])
def test_a_norm_without_a_weight_gets_ones(order: str) -> None:
    body = BARE.replace("(x, inverse)", order)
    expected, model = run(model_of(body)), model_of(body)
    assert NormsPass()(model).modified
    common_passes.RemoveUnusedNodesPass()(model)
    (node,) = model.graph
    assert (node.op_type, node.inputs[1].const_value.numpy().tolist()) == ("RMSNormalization", [1.0] * 8)
    np.testing.assert_allclose(run(model), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Pow (x, two)", "Pow (other, two)"),
        ("Pow (x, two)", "Pow (x, epsilon)"),
        ("ReduceMean (squares, last)", "ReduceMean (squares, tokens)"),
        ("Mul (x, inverse)", "Mul (other, inverse)"),
    ],
)
def test_what_is_no_such_norm_stays(before: str, after: str) -> None:
    body = BARE.replace(before, after)
    expected, model = run(model_of(body)), model_of(body)
    assert not NormsPass()(model).modified
    np.testing.assert_array_equal(run(model), expected)


def test_it_becomes_a_layer_norm() -> None:
    expected, model = run(model_of(NORM)), model_of(NORM)
    assert NormsPass()(model).modified
    common_passes.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph] == ["LayerNormalization"]
    np.testing.assert_allclose(run(model), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ReduceMean (x, last)", "ReduceMean (other, last)"),
        ("ReduceMean (x, last)", "ReduceMean (x, tokens)"),
        ("Sub (x, mean)", "Sub (mean, x)"),
        ("Sub (x, mean)", "Add (x, mean)"),
    ],
)
def test_other_differences_stay(before: str, after: str) -> None:
    body = NORM.replace(before, after)
    expected, model = run(model_of(body)), model_of(body)
    assert not NormsPass()(model).modified
    np.testing.assert_array_equal(run(model), expected)
