"""A mixture of experts keeps its tokens on the second axis, and its nodes are one operator then."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx_ir.passes import common as common_passes
from ort_sessions import opened

from tide_export.graph.rewriting import run_passes
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.lower.onnxruntime.expert_rows import ExpertRowsPass
from tide_export.lower.onnxruntime.gated_matmuls import GatedMatMulsPass
from tide_export.lower.onnxruntime.layers import LayersPass
from tide_export.names.operators import OP_GATE, OP_HALF_EXPERTS, OP_HALF_MATMUL, OP_LAYERS

OP = OP_HALF_EXPERTS[OP_HALF_MATMUL["bf16"]]
EXPERTS, WIDTH, INNER = 4, 16, 24
HEADER = (
    f'<ir_version: 10, opset_import: ["" : 23, "tide" : 1]> experts (float[1, n, {WIDTH}] x, int64[n, 2] chosen,'
    f" float[n, 2] shares, float[n, 2, {2 * INNER}] added) => (float[1, n, {WIDTH}] y)"
)
WEIGHTS = f"""int64[2] flat = {{-1, {WIDTH}}}, int64[3] whole = {{1, -1, {WIDTH}}}, int64[1] zero = {{0}},
    int64[1] one = {{1}}, int64[1] two = {{2}},
    int64[1] end = {{9223372036854775807}}, float low = {{-0.5}}, float high = {{0.7}}"""
BEGIN = """rows = Reshape (x, flat)  each = Unsqueeze (rows, one)
    both = tide.TideExpertMatMul <num_experts = 4, transposed = 0> (each, chosen, up)"""
END = """out = tide.TideExpertMatMul <num_experts = 4, transposed = 0> (gated, chosen, down)
    column = Unsqueeze (shares, two)  weighed = Mul (out, column)
    sums = ReduceSum <keepdims = 0> (weighed, one)  made = Reshape (sums, whole)  y = Add (x, made)"""
GATES = {
    "halves": """gate, value = Split <axis = -1, num_outputs = 2> (both)
        sigmoid = Sigmoid (gate)  silu = Mul (gate, sigmoid)  gated = Mul (silu, value)""",
    "every second, bounded, with a bias": """biased = Add (both, added)
        gate = Slice (biased, zero, end, two, two)  value = Slice (biased, one, end, two, two)
        a = Clip (gate, , high)  b = Clip (value, low, high)  sigmoid = Sigmoid (a)  silu = Mul (a, sigmoid)
        gated = Mul (silu, b)""",
}


def model_of(gate: str, end: str = END) -> ir.Model:
    parsed = onnx.parser.parse_model(f"{HEADER} <{WEIGHTS}> {{ {BEGIN} {GATES[gate]} {end} }}")
    rng = np.random.default_rng(0)
    for name, shape in (("up", (EXPERTS, 2 * INNER, WIDTH)), ("down", (EXPERTS, WIDTH, INNER))):
        array = rng.standard_normal(shape, dtype=np.float32).view(np.uint32) & 0xFFFF0000  # of bfloat16
        parsed.graph.initializer.append(onnx.numpy_helper.from_array(array.view(np.float32), name))
    model = ir.serde.deserialize_model(parsed)
    known = {"rows": ["n", WIDTH], "each": ["n", 1, WIDTH], "both": ["n", 2, 2 * INNER], "gated": ["n", 2, INNER]}
    known |= {name: ["n", 2, INNER] for name in ("gate", "value", "sigmoid", "silu", "a", "b")}
    known |= {"biased": ["n", 2, 2 * INNER], "out": ["n", 2, WIDTH], "weighed": ["n", 2, WIDTH], "sums": ["n", WIDTH]}
    known |= {"column": ["n", 2, 1], "made": [1, "n", WIDTH], "y": [1, "n", WIDTH]}
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
        for value in node.outputs:
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(known[str(value.name)])
    return model


def lowered(gate: str, end: str = END) -> ir.Model:
    model = model_of(gate, end)
    unused = common_passes.RemoveUnusedNodesPass()
    run_passes(model, ExpertMatMulPass(half="bf16"), ExpertRowsPass(), unused, GatedMatMulsPass(), unused)
    return model


def run(model: ir.Model, operators: bool) -> np.ndarray:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((1, 7, WIDTH), dtype=np.float32), "chosen": rng.integers(0, EXPERTS, (7, 2))}
    feeds |= {"shares": rng.random((7, 2), dtype=np.float32)}
    feeds |= {"added": rng.standard_normal((7, 2, 2 * INNER), dtype=np.float32)}
    session = opened(model, operators=operators)
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})[0]


@pytest.mark.parametrize("gate", GATES)
def test_they_become_one_operator_of_the_same_numbers(gate: str) -> None:
    expanded = model_of(gate)
    run_passes(expanded, ExpertMatMulPass())
    expected = run(expanded, operators=False)
    model = lowered(gate)
    assert not ExpertRowsPass()(model).modified
    for operators in (False, True):
        np.testing.assert_allclose(run(model, operators), expected, rtol=1e-4, atol=1e-4)
    LayersPass()(model)
    (layers,) = [node for node in model.graph if node.domain]
    assert layers.op_type == OP_LAYERS
    held = {line.split()[0] for line in layers.attributes["nodes"].as_string().splitlines()[1:]}
    between = {OP_GATE} if gate == "halves" else {"Slice", "Clip", "Sigmoid"}
    assert held - {"Reshape"} == {OP, *between, "Mul", "ReduceSum", "Add"}
    for operators in (False, True):
        np.testing.assert_allclose(run(model, operators), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ReduceSum <keepdims = 0> (weighed, one)", "ReduceMax <keepdims = 0> (weighed, one)"),
        ("Reshape (sums, whole)", "Unsqueeze (sums, zero)"),
    ],
    ids=["another reduction", "no Reshape"],
)
def test_other_graphs_are_left(before: str, after: str) -> None:
    model = lowered("halves", END.replace(before, after))
    assert not ExpertRowsPass()(model).modified
    assert [node.op_type for node in model.graph if node.domain] == [OP, OP_GATE, OP]
