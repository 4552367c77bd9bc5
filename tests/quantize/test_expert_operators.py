"""The operators for products with experts: the same as their functions, whatever rows are computed together."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from ort_sessions import opened, operators_of

from tide_export.bundle.manifest import Quantization
from tide_export.graph.rewriting import HALF
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.model.fp4_matrices import Mxfp4Matrix
from tide_export.names.operators import (
    DOMAIN,
    OP_EXPERT_MATMUL,
    OP_HALF_EXPERTS,
    OP_HALF_MATMUL,
    OP_INTEGER_EXPERTS,
    OP_INTEGER_MATMUL,
    OP_MXFP4_EXPERTS,
)
from tide_export.quantize.rounding import round_to_nearest

OPERATORS = {
    "bf16": OP_HALF_EXPERTS[OP_HALF_MATMUL["bf16"]],
    "fp16": OP_HALF_EXPERTS[OP_HALF_MATMUL["fp16"]],
    "int4": OP_INTEGER_EXPERTS[OP_INTEGER_MATMUL[4]],
    "int8": OP_INTEGER_EXPERTS[OP_INTEGER_MATMUL[8]],
    "mxfp4": OP_MXFP4_EXPERTS,
}
CHOSEN = 3
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def matrices(kind: str, experts: int, n_size: int, k_size: int) -> list:
    rng = np.random.default_rng(n_size)
    if kind == "mxfp4":
        codes = rng.integers(0, 256, (experts, n_size, k_size // 32, 16), dtype=np.uint8)
        exponents = rng.integers(110, 130, (experts, n_size, k_size // 32), dtype=np.uint8)
        return [Mxfp4Matrix(*matrix) for matrix in zip(codes, exponents, strict=True)]
    settings = Quantization("rtn", 8 if kind == "int8" else 4, 32, symmetric=True, accuracy_level=4)
    weights = rng.standard_normal((experts, n_size, k_size), dtype=np.float32)
    return [round_to_nearest(weight, settings) for weight in weights]


def model(
    kind: str, experts: int, n_size: int, k_size: int, rows: int | str, lead: tuple = ("t",)
) -> tuple[bytes, list]:
    """x [lead, rows, K] times the experts [lead, 3]; and the values of the matrices [N, K]."""
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([*lead, rows, k_size]))
    choice = ir.Value(name="experts", type=ir.TensorType(INT64), shape=ir.Shape([*lead, CHOSEN]))
    attributes: dict = {"num_experts": experts, "transposed": 0}
    if kind in HALF:
        values = np.random.default_rng(1).standard_normal((experts, n_size, k_size), dtype=np.float32)
        values = values.astype(HALF[kind].numpy()).astype(np.float32)
        stored = [ir.Value(name="w", type=ir.TensorType(FLOAT), shape=ir.Shape(values.shape))]
        stored[0].const_value = ir.tensor(values, name="w")
        replacing, all_values = ExpertMatMulPass(half=kind), list(values)
    else:
        blocks = matrices(kind, experts, n_size, k_size)
        attributes |= {"weights": ["w"], "width": n_size}
        settings = Quantization("checkpoint", 4, 32, symmetric=True, accuracy_level=4)
        replacing = ExpertMatMulPass({f"w.{index}": matrix for index, matrix in enumerate(blocks)}, settings)
        stored, all_values = [], [matrix.values() for matrix in blocks]
    node = ir.node(OP_EXPERT_MATMUL, [x, choice, *stored], attributes, domain=DOMAIN, name="product")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(FLOAT)
    node.outputs[0].shape = ir.Shape([*lead, CHOSEN, n_size])
    imports = {"": 23, DOMAIN: 1, "com.microsoft": 1}
    graph = ir.Graph([x, choice], node.outputs, nodes=[node], initializers=stored, opset_imports=imports, name="g")
    made = ir.Model(graph, ir_version=11)
    assert replacing(made).modified
    assert [node.op_type for node in made.graph] == [OPERATORS[kind]]
    for value in stored:
        del made.graph.initializers[str(value.name)]
    return ir.to_proto(made).SerializeToString(), all_values


@pytest.mark.parametrize("rows", [1, CHOSEN])
@pytest.mark.parametrize(("experts", "n_size", "k_size"), [(1, 16, 32), (5, 38, 96), (4, 64, 320), (130, 33, 64)])
@pytest.mark.parametrize("kind", OPERATORS)
def test_the_operator_is_the_function(
    kind: str, experts: int, n_size: int, k_size: int, rows: int, tmp_path: Path
) -> None:
    proto, values = model(kind, experts, n_size, k_size, rows)
    session, plain = opened(proto, tmp_path), opened(proto, operators=False)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((23, rows, k_size), dtype=np.float32)
    x[3] = 0
    choice = rng.integers(0, experts, (23, CHOSEN))
    choice[4:9] = experts - 1  # more rows of one expert than of any other
    inputs = {"x": x, "experts": choice}
    (expected,), (whole,) = plain.run(None, inputs), session.run(None, inputs)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    every = np.broadcast_to(x, (23, CHOSEN, k_size))
    exact = np.einsum("tck,tcnk->tcn", every, np.stack(values)[choice])
    np.testing.assert_allclose(whole, exact, rtol=0, atol=(1e-5 if kind in HALF else 0.03) * np.abs(exact).max())
    for count in (0, 1, 2, 5, 8, 20):  # not even rounding depends on which rows there are
        some = session.run(None, {"x": x[:count], "experts": choice[:count]})[0]
        np.testing.assert_array_equal(some, whole[:count])
    if OPERATORS[kind] not in operators_of(session):
        assert kind not in HALF
        pytest.skip("this CPU has no AVX2: the function ran")


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_several_leading_axes_are_tokens(kind: str) -> None:
    flat, _ = model(kind, 6, 40, 64, 1)
    nested, _ = model(kind, 6, 40, 64, 1, lead=(1, "t"))
    rng = np.random.default_rng(3)
    x, choice = rng.standard_normal((7, 1, 64), dtype=np.float32), rng.integers(0, 6, (7, CHOSEN))
    (expected,) = opened(flat).run(None, {"x": x, "experts": choice})
    for session in (opened(nested), opened(nested, operators=False)):
        (found,) = session.run(None, {"x": x[None], "experts": choice[None]})
        assert found.shape == (1, 7, CHOSEN, 40)
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_an_expert_that_there_is_not_gives_no_number() -> None:
    proto, _ = model("bf16", 4, 16, 32, 1)
    x = np.ones((2, 1, 32), np.float32)
    (found,) = opened(proto).run(None, {"x": x, "experts": np.array([[0, 4, 1], [-1, 2, 2**40]])})
    assert np.isnan(found).all(axis=-1).tolist() == [[False, True, False], [True, False, True]]


@pytest.mark.parametrize(("rows", "tokens"), [(2, 5), (1, 4)])
def test_rows_that_do_not_fit_the_choice_are_refused(rows: int, tokens: int) -> None:
    proto, _ = model("bf16", 4, 16, 32, "c")
    inputs = {"x": np.ones((5, rows, 32), np.float32), "experts": np.zeros((tokens, CHOSEN), np.int64)}
    with pytest.raises(Exception, match="takes x"):
        opened(proto).run(None, inputs)


def test_functions_of_other_numbers_of_experts_are_told_apart() -> None:
    """Layers of 4 and of 6 experts: the second function has an overload, and both run without the library."""
    values = {count: np.random.default_rng(count).standard_normal((count, 32, 32)) for count in (4, 6)}
    exact = {count: array.astype(HALF["bf16"].numpy()).astype(np.float32) for count, array in values.items()}
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape(["t", 1, 32]))
    choice = ir.Value(name="experts", type=ir.TensorType(INT64), shape=ir.Shape(["t", 1]))
    nodes, stored, last = list[ir.Node](), list[ir.Value](), x
    for count, array in exact.items():
        weight = ir.Value(name=f"w{count}", type=ir.TensorType(FLOAT), shape=ir.Shape(array.shape))
        weight.const_value = ir.tensor(array, name=f"w{count}")
        attributes = {"num_experts": count, "transposed": 0}
        node = ir.node(OP_EXPERT_MATMUL, [last, choice, weight], attributes, domain=DOMAIN, name=f"product{count}")
        last = node.outputs[0]
        last.name, last.type, last.shape = f"y{count}", ir.TensorType(FLOAT), ir.Shape(["t", 1, 32])
        nodes.append(node)
        stored.append(weight)
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph([x, choice], [last], nodes=nodes, initializers=stored, opset_imports=imports, name="two")
    made = ir.Model(graph, ir_version=11)
    ExpertMatMulPass(half="bf16")(made)
    assert [node.overload for node in made.graph] == ["", "6"]
    rows = np.random.default_rng(0).standard_normal((5, 1, 32), dtype=np.float32)
    experts = np.array([[0, 1, 2, 3, 3]]).T
    for session in (opened(made), opened(made, operators=False)):
        (found,) = session.run(None, {"x": rows, "experts": experts})
        expected = np.einsum("tk,tnk,tmn->tm", rows[:, 0], exact[4][experts[:, 0]], exact[6][experts[:, 0]])
        np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-4)
