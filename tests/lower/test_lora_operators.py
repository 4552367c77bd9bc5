"""TideLora and TideGate, operators and functions, against NumPy: one sequence or several, each with its own adapter."""

import numpy as np
import onnx_ir as ir
import pytest
from ort_sessions import opened

from tide_export.graph.rewriting import FLOAT, INT64, new_node, typed_value
from tide_export.lower.onnxruntime.gated_matmuls import gate_function
from tide_export.lower.onnxruntime.lora import lora_function
from tide_export.names.operators import DOMAIN, OP_GATE, OP_LORA

COLUMNS = 1037  # of a gate
ADAPTERS, RANK, OFFSET = 3, 5, 7  # row 0 is of none
INPUTS, OUTPUTS, COLUMN, WIDTH = 2100, 1300, 90, 1100  # more than one thread takes at a time


def session(
    op_type: str,
    inputs: dict[str, tuple],
    attributes: dict[str, int],
    function: ir.Function,
    operators: bool,
    shape=None,
):
    values = [typed_value(name, *types) for name, types in inputs.items()]
    first = values[0]
    node = new_node(op_type, values, attributes, name="node", domain=DOMAIN, outputs=[(FLOAT, shape or first.shape)])
    node.overload = function.overload
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23, DOMAIN: 1}, name="graph")
    return opened(ir.Model(graph, ir_version=10, functions=[function]), operators=operators)


@pytest.mark.parametrize("operators", [True, False], ids=["operator", "function"])
@pytest.mark.parametrize(("adapters", "counts"), [([2], [4]), ([0], [2]), ([1, 0, 2, 1], [1, 3, 2, 0])])
def test_each_sequence_has_its_adapter(operators: bool, adapters: list[int], counts: list[int]) -> None:
    several, tokens = len(adapters) > 1, sum(counts)
    inputs: dict[str, tuple] = {
        "y": (FLOAT, [1, "tokens", OUTPUTS]),
        "x": (FLOAT, [1, "tokens", INPUTS]),
        "weights": (FLOAT, ["adapters", "numbers"]),
        "rows": (INT64, ["sequences"]),
    }
    if several:
        inputs["starts"] = (INT64, ["starts"])
    attributes = {"offset": OFFSET, "rank": RANK, "column": COLUMN, "width": WIDTH}
    adapting = session(OP_LORA, inputs, attributes, lora_function(several), operators)
    rng = np.random.default_rng(0)
    y, x = (rng.standard_normal((1, tokens, size)).astype(np.float32) for size in (OUTPUTS, INPUTS))
    weights = rng.standard_normal((ADAPTERS, OFFSET + RANK * (INPUTS + WIDTH) + 3)).astype(np.float32) / 30
    weights[0] = 0  # and before the matrices 0: they are not read
    weights[1:, OFFSET - 1] = 1
    feeds = {"y": y, "x": x, "weights": weights, "rows": np.array(adapters)}
    if several:
        feeds["starts"] = np.cumsum([0, *counts])
    (result,) = adapting.run(None, feeds)

    expected, token = y.astype(np.float64), 0
    for adapter, count in zip(adapters, counts, strict=True):
        middle = OFFSET + INPUTS * RANK
        down = weights[adapter, OFFSET:middle].reshape(INPUTS, RANK).astype(np.float64)
        up = weights[adapter, middle : middle + RANK * WIDTH].reshape(RANK, WIDTH)
        own = slice(token, token + count)
        expected[0, own, COLUMN : COLUMN + WIDTH] += x[0, own] @ down @ up
        token += count
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    if adapters == [0]:
        np.testing.assert_array_equal(result, y)
    if several and operators:  # as alone, bit for bit
        alone = {"y": y[:, 4:6], "x": x[:, 4:6], "weights": weights, "rows": np.array([2]), "starts": np.array([0, 2])}
        (same,) = adapting.run(None, alone)
        np.testing.assert_array_equal(result[:, 4:6], same)


@pytest.mark.parametrize("operators", [True, False], ids=["operator", "function"])
def test_the_gate_is_a_silu(operators: bool) -> None:
    inputs: dict[str, tuple] = {"x": (FLOAT, [1, "tokens", 2 * COLUMNS])}
    x = np.random.default_rng(0).standard_normal((1, 30, 2 * COLUMNS)).astype(np.float32) * 9
    gates, ups = np.split(x, 2, axis=-1)
    (result,) = session(OP_GATE, inputs, {}, gate_function(23), operators, [1, "tokens", COLUMNS]).run(None, {"x": x})
    np.testing.assert_allclose(result, gates / (1 + np.exp(-gates)) * ups, rtol=2e-6, atol=5e-5)
