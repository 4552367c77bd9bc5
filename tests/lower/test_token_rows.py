"""The pass that keeps tokens on the second axis: what it undoes, what it leaves, and that no number changes."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes import common as common_passes

from tide_export.lower.onnxruntime.token_rows import TokenRowsPass

HEADER = '<ir_version: 10, opset_import: ["" : 23]> rows (float[1, N, 12] x) => (float[1, N, 12] y)'

# A convolution's surroundings in LFM2.
SWAPPED = """<float[1, N, 4] b, float[1, N, 4] one, float half = {0.5}> {
    turned = Transpose <perm = [0, 2, 1]> (x)
    first, second, third = Split <axis = -2, num_outputs = 3> (turned)
    mixed = Mul (first, third)  halved = Mul (mixed, half)
    a = Transpose <perm = [0, 2, 1]> (halved)
    b = Relu (a)
    back = Transpose <perm = [0, 2, 1]> (b)
    gate = Sigmoid (back)  gated = Mul (second, gate)
    one = Transpose <perm = [0, 2, 1]> (gated)
    made = Concat <axis = 2> (one, b, one)  y = Neg (made)
}"""
# A norm by heads in Qwen3.5.
MERGED = """<float[3] scale = {1, 2, 3}, float[1, N, 12] whole, int64[2] rows = {-1, 3}> {
    heads = Reshape (x, rows)
    doubled = Add (x, x)  gates = Reshape (doubled, rows)
    normal = RMSNormalization <axis = -1> (heads, scale)
    share = Sigmoid (gates)  gate = Mul (gates, share)  gated = Mul (normal, gate)
    target = Shape (x)
    whole = Reshape (gated, target)
    y = Neg (whole)
}"""
# Norms of queries in Gemma 3.
TURNED = """<float[3] scale = {1, 2, 3}, int64[4] heads = {0, 0, 4, 3}> {
    split = Reshape (x, heads)
    turned = Transpose <perm = [0, 2, 1, 3]> (split)  normal = RMSNormalization <axis = 3> (turned, scale)
    share = Sigmoid (turned)  gated = Mul (normal, share)  scaled = Mul (gated, scale)
    back = Transpose <perm = [0, 2, 1, 3]> (scaled)
    target = Shape (x)  y = Reshape (back, target)
}"""
SOFTPLUS = """<float threshold = {20}, float zero = {0}, float most = {inf}> {
    soft = Softplus (x)  large = Greater (x, threshold)  chosen = Where (large, x, soft)
    bounded = Clip (chosen, zero, most)
    y = Neg (bounded)
}"""
LEFT = {
    "a weight by channel in the swapped layout": """<float[12, 1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
        turned = Transpose <perm = [0, 2, 1]> (x)  scaled = Mul (turned, w)
        back = Transpose <perm = [0, 2, 1]> (scaled)  y = Neg (back)
    }""",
    "a split of states with other axes": """<int64[4] heads = {0, 0, 2, 6}, int64[1] axis = {2}> {
        split = Reshape (x, heads)  a, b = Split <axis = 2, num_outputs = 2> (split)
        one = Squeeze (a, axis)  turned = Transpose <perm = [0, 2, 1]> (one)  share = Sigmoid (turned)
        other = Squeeze (b, axis)  scores = MatMul (other, share)  y = MatMul (scores, x)
    }""",
    "a node over all tokens": """{
        turned = Transpose <perm = [0, 2, 1]> (x)  shares = Softmax <axis = 2> (turned)
        back = Transpose <perm = [0, 2, 1]> (shares)  y = Neg (back)
    }""",
    "a norm by whole columns": """<float[6] scale = {1, 2, 3, 4, 5, 6}, float[1, N, 12] whole,
                                int64[2] rows = {-1, 6}> {
        heads = Reshape (x, rows)  normal = LpNormalization <axis = 0> (heads)  scaled = Mul (normal, scale)
        target = Shape (x)  whole = Reshape (scaled, target)  y = Neg (whole)
    }""",
    "another threshold": """<float threshold = {5}> {
        soft = Softplus (x)  large = Greater (x, threshold)  chosen = Where (large, x, soft)  y = Neg (chosen)
    }""",
    "a bound that a Softplus reaches": """<float low = {0.5}> {
        soft = Softplus (x)  bounded = Clip (soft, low)  y = Neg (bounded)
    }""",
}


def model_of(body: str) -> ir.Model:
    parsed = onnx.parser.parse_model(f"{HEADER} {body}")
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(parsed))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
    return model


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {"x": x})[0]


def changed(body: str) -> ir.Model:
    """The model after the pass and without what it no longer needs; it computes the same numbers."""
    before, after = model_of(body), model_of(body)
    TokenRowsPass()(after)
    common_passes.RemoveUnusedNodesPass()(after)
    for tokens in (1, 5):
        x = (np.random.default_rng(tokens).standard_normal((1, tokens, 12)) * 12).astype(np.float32)
        np.testing.assert_array_equal(run(after, x), run(before, x))
    return after


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_swapped_channels() -> None:
    model = changed(SWAPPED)
    assert "Transpose" not in kinds(model)
    (split,) = [node for node in model.graph if node.op_type == "Split"]
    assert split.attributes["axis"].as_int() == 2
    assert [list(value.shape)[2] for value in split.outputs] == [4, 4, 4]


def test_merged_heads() -> None:
    model = changed(MERGED)
    assert all(len(value.shape) >= 3 for node in model.graph for value in node.outputs if node.op_type != "Shape")
    assert [list(node.outputs[0].shape)[2:] for node in model.graph if node.op_type == "Reshape"] == [
        [4, 3],
        [4, 3],
        [12],
    ]


def test_turned_heads() -> None:
    assert kinds(changed(TURNED)).count("Transpose") == 0


def test_softplus() -> None:
    assert kinds(changed(SOFTPLUS)) == ["Softplus", "Neg"]


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_others_are_left(body: str) -> None:
    assert kinds(changed(body)) == kinds(model_of(body))
