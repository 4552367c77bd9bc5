"""An MLP's gate and up projections in one operator: the kernel of every instruction set, the pass, and the operator
against the graph it replaces, with the library and without it."""

import ctypes
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from ort_sessions import opened, operators_of

from tide_export.bundle.manifest import Quantization
from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import HALF, run_passes
from tide_export.lower.onnxruntime.gated_matmuls import GatedMatMulsPass
from tide_export.lower.onnxruntime.half_weights import half_matmul_function
from tide_export.lower.onnxruntime.quantized_matmuls import integer_matmul_function
from tide_export.names.operators import (
    DOMAIN,
    OP_GATED_MATMUL,
    OP_HALF_MATMUL,
    OP_INTEGER_MATMUL,
    OP_OUTLIER_MATMUL,
    WEIGHTS_METADATA,
)
from tide_export.quantize.outliers import add_outliers
from tide_export.quantize.rounding import round_to_nearest

FLOAT = ir.DataType.FLOAT
INTEGERS = {name: bits for bits, name in OP_INTEGER_MATMUL.items()} | {OP_OUTLIER_MATMUL: 4}
HALVES = {name: weights for weights, name in OP_HALF_MATMUL.items()}


@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "baseline"])
@pytest.mark.parametrize("count", [1, 5, 16, 67])
def test_a_kernel(kernels: Path, instruction_set: str, count: int) -> None:
    rng = np.random.default_rng(count)
    gates = np.resize(np.array([-1000, -88, -40, -1, -1e-6, 0, 1e-6, 3, 88, 1000], np.float32), 4 * count)
    gates[: 2 * count] = 5 * rng.standard_normal(2 * count)
    ups = rng.standard_normal(4 * count, dtype=np.float32)
    with np.errstate(over="ignore"):
        exact = ups * (gates / (1 + np.exp(-gates.astype(np.float64))))
    whole = gated(kernels, instruction_set, gates, ups)
    np.testing.assert_allclose(whole, exact, rtol=2e-6, atol=1e-30)
    parts = [gated(kernels, instruction_set, gates[i : i + count], ups[i : i + count])
             for i in range(0, 4 * count, count)]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(parts), whole)  # whatever its place in a vector


def test_numbers_that_are_none(kernels: Path) -> None:
    gates = np.array([np.nan, 1, np.inf, -np.inf, 2], np.float32)
    ups = np.array([1, np.nan, 2, 2, np.inf], np.float32)
    y = gated(kernels, "baseline", gates, ups)
    np.testing.assert_array_equal(y, np.array([np.nan, np.nan, np.inf, np.nan, np.inf], np.float32))


def gated(library: Path, instruction_set: str, gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """By the kernel of that instruction set; skips the test where this CPU has none."""
    gates, y = gates.copy(), ups.copy()
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (gates, y))
    pointer, count = next(arrays), ctypes.c_int64(len(y))
    if ctypes.CDLL(str(library)).elementwise(instruction_set.encode(), 0, pointer, count, next(arrays)):
        pytest.skip(f"this CPU has no {instruction_set}")
    return y


def mlp(op: str, rows: int = 96, columns: int = 80, change: str = "") -> ir.Model:
    """SiLU(x G) * (x U) by operator `op`, G and U [rows, columns]; `change`: what keeps it from being replaced."""
    function = half_matmul_function(HALVES[op], OPSET) if op in HALVES else integer_matmul_function(op)
    inputs = [ir.Value(name=n, type=ir.TensorType(FLOAT), shape=ir.Shape(["m", 1, columns])) for n in ("x", "other")]
    weights: list[ir.Value] = []
    nodes: list[ir.Node] = []

    def node(op_type: str, values: list[ir.Value], attributes: dict | None = None, domain: str = "") -> ir.Value:
        nodes.append(ir.node(op_type, values, attributes, domain=domain))
        output = nodes[-1].outputs[0]
        output.name, output.type, output.shape = f"v{len(nodes)}", ir.TensorType(FLOAT), ir.Shape(["m", 1, rows])
        return output

    def matmul(x: ir.Value, seed: int) -> ir.Value:
        values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
        attributes = {}
        if op in HALVES:
            dtype = HALF[HALVES[op]]
            stored = [ir.tensor(values.astype(dtype.numpy()), dtype=dtype, name=f"w{seed}")]
        else:
            settings = Quantization("rtn", INTEGERS[op], 32, symmetric=True, accuracy_level=4)
            blocks = round_to_nearest(values, settings)
            if op == OP_OUTLIER_MATMUL:
                outliers = np.arange(32) + (seed if change == "other outliers" else 0)
                blocks = add_outliers(blocks, values, outliers, settings, round_to_nearest)
            arrays = [blocks.packed, blocks.scales, *([] if blocks.outliers is None else [blocks.outliers])]
            stored = [ir.tensor(array, name=f"w{seed}.{i}") for i, array in enumerate(arrays)]
            attributes = {"K": blocks.columns, "N": rows, "bits": blocks.bits, "block_size": 32, "accuracy_level": 4}
        named = [ir.Value(name=t.name, type=ir.TensorType(t.dtype), shape=t.shape, const_value=t) for t in stored]
        weights.extend(named)
        y = node(op, [x, *named], attributes, DOMAIN)
        nodes[-1].metadata_props[WEIGHTS_METADATA] = f"matrix{seed}"
        return y

    gate = matmul(inputs[0], 1)
    up = gate if change == "one matmul" else matmul(inputs[change == "another input"], 2)
    sigmoid = node("Sigmoid", [up if change == "another gate" else gate])
    product = node("Mul", [up, node("Mul", [sigmoid, gate])])
    read = {"the gate is read": gate, "the rest is read": up, "sigmoid is read": sigmoid}
    outputs = [product, *([read[change]] if change in read else [])]
    imports = {"": OPSET, DOMAIN: 1, "com.microsoft": 1}
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, opset_imports=imports, name="mlp")
    return ir.Model(graph, ir_version=11, functions=[function])


@pytest.mark.parametrize("op", OP_GATED_MATMUL)
@pytest.mark.parametrize(("rows", "columns"), [(3, 32), (96, 80), (700, 576)])
def test_the_operator_is_the_graph(op: str, rows: int, columns: int, tmp_path: Path) -> None:
    columns = columns if op != OP_OUTLIER_MATMUL else -(-columns // 32) * 32  # whole blocks
    before, model = opened(mlp(op, rows, columns)), mlp(op, rows, columns)
    run_passes(model, GatedMatMulsPass())
    assert [(node.domain, node.op_type) for node in model.graph] == [(DOMAIN, OP_GATED_MATMUL[op])]
    assert model.graph[0].metadata_props[WEIGHTS_METADATA] == "matrix1\nmatrix2"
    session, plain = opened(model, tmp_path), opened(model, operators=False)
    x = np.random.default_rng(1).standard_normal((40, 1, columns), dtype=np.float32)
    feeds = {"x": x, "other": x}
    (whole,) = session.run(None, feeds)
    for other in (before, plain):
        (expected,) = other.run(None, feeds)
        np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    for count in (0, 1, 2, 3, 7, 17):  # not even rounding depends on how many rows there are
        (y,) = session.run(None, {"x": x[:count], "other": x[:count]})
        np.testing.assert_array_equal(y, whole[:count])
    ran = operators_of(session)
    if op in INTEGERS and OP_GATED_MATMUL[op] not in ran:
        pytest.skip("this CPU has no AVX2: MatMulNBits ran")
    assert OP_GATED_MATMUL[op] in ran


CHANGES = ["one matmul", "another input", "another gate", "the gate is read", "the rest is read", "sigmoid is read"]


@pytest.mark.parametrize("change", CHANGES)
def test_another_graph_stays(change: str) -> None:
    model = mlp("TideBf16MatMul", change=change)
    before = [node.op_type for node in model.graph]
    run_passes(model, GatedMatMulsPass())
    assert [node.op_type for node in model.graph] == before


def test_matmuls_of_other_outliers_stay() -> None:
    model = mlp(OP_OUTLIER_MATMUL, columns=64, change="other outliers")
    run_passes(model, GatedMatMulsPass())
    assert [node.op_type for node in model.graph].count(OP_OUTLIER_MATMUL) == 2


def test_the_operator_refuses_an_odd_number_of_rows() -> None:
    model = mlp("TideBf16MatMul", 3)
    run_passes(model, GatedMatMulsPass())
    (node,) = model.graph
    weights = node.inputs[1]
    assert weights is not None
    assert weights.const_value is not None
    weights.const_value = ir.tensor(weights.const_value.numpy()[:5], dtype=weights.dtype, name=weights.name)
    weights.shape = weights.const_value.shape
    session = opened(model)
    x = np.zeros((1, 1, 80), np.float32)
    with pytest.raises(Exception, match="takes as many rows for it as for the rest"):
        session.run(None, {"x": x, "other": x})
