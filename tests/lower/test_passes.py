"""Each pass alone: it rewrites its pattern, leaves similar ones, and changes no number."""

import logging

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes import common as common_passes

from tide_export.graph import rewriting
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.lower.onnxruntime.flat_matmuls import FlatMatMulsPass
from tide_export.lower.onnxruntime.packed_projections import PackedProjectionsPass
from tide_export.lower.onnxruntime.paged_attention import PagedAttentionFunctionsPass
from tide_export.lower.onnxruntime.skip_norms import SkipNormsPass
from tide_export.lower.onnxruntime.transposed_weights import TransposedWeightsPass

FLOAT = ir.DataType.FLOAT
RNG = np.random.default_rng(0)


class Sketch:
    """A small model under construction: inputs, weights, ops with shapes, run before and after a pass."""

    def __init__(self) -> None:
        self.inputs: list[ir.Value] = []
        self.weights: list[ir.Value] = []
        self.nodes: list[ir.Node] = []

    def input(self, name: str, shape: list) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def weight(self, name: str, *shape: int) -> ir.Value:
        array = RNG.normal(size=shape).astype(np.float32)
        value = ir.Value(
            name=name, type=ir.TensorType(FLOAT), shape=ir.Shape(shape), const_value=ir.tensor(array, name=name)
        )
        self.weights.append(value)
        return value

    def op(self, op_type: str, inputs: list, attributes: dict | None = None, shape: list | None = None) -> ir.Value:
        node = ir.node(op_type, inputs, attributes=attributes or {}, name=f"n{len(self.nodes)}")
        node.outputs[0].name = f"v{len(self.nodes)}"
        node.outputs[0].type = ir.TensorType(FLOAT)
        node.outputs[0].shape = ir.Shape(shape) if shape is not None else None
        self.nodes.append(node)
        return node.outputs[0]

    def model(self, *outputs: ir.Value) -> ir.Model:
        for value in outputs:
            value.type = ir.TensorType(FLOAT)
        imports = {"": 23, "com.microsoft": 1, "tide": 1}
        graph = ir.Graph(self.inputs, outputs, nodes=self.nodes, initializers=self.weights, opset_imports=imports)
        return ir.Model(graph, ir_version=10)


def run(model: ir.Model) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = model.clone()
    PagedAttentionFunctionsPass()(model)
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    rng = np.random.default_rng(1)
    feeds = {
        value.name: rng.normal(size=[d if isinstance(d, int) else 5 for d in value.shape]).astype(np.float32)
        for value in session.get_inputs()
    }
    return session.run(None, feeds)


def apply(rewrite: ir.passes.InPlacePass, model: ir.Model) -> tuple[bool, list[str]]:
    """Runs the pass, requires unchanged numbers, and returns whether it changed anything and the remaining op types."""
    before = run(model)
    modified = rewrite(model).modified
    for old, new in zip(before, run(model), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)
    return modified, sorted(node.op_type for node in model.graph)


@pytest.mark.parametrize("norm", ["RMSNormalization", "LayerNormalization"])
def test_an_addition_of_states_and_its_norm_become_one(norm: str) -> None:
    sketch = Sketch()
    a, b = sketch.input("a", [1, "s", 16]), sketch.input("b", [1, "s", 16])
    total = sketch.op("Add", [a, b], shape=[1, "s", 16])
    weights = [sketch.weight("scale", 16)] + ([sketch.weight("bias", 16)] if norm == "LayerNormalization" else [])
    normalized = sketch.op(norm, [total, *weights], {"axis": -1, "epsilon": 1e-5}, shape=[1, "s", 16])
    modified, ops = apply(SkipNormsPass(), sketch.model(normalized, total))
    assert modified
    assert len(ops) == 1
    assert ops[0].startswith("Skip")


def test_an_addition_of_a_bias_is_no_residual() -> None:
    sketch = Sketch()
    a = sketch.input("a", [1, "s", 16])
    total = sketch.op("Add", [a, sketch.weight("bias", 16)], shape=[1, "s", 16])
    normalized = sketch.op("RMSNormalization", [total, sketch.weight("scale", 16)], {"axis": -1}, shape=[1, "s", 16])
    assert apply(SkipNormsPass(), sketch.model(normalized)) == (False, ["Add", "RMSNormalization"])


def test_a_norm_over_two_axes_stays() -> None:
    sketch = Sketch()
    a, b = sketch.input("a", [1, 5, 16]), sketch.input("b", [1, 5, 16])
    total = sketch.op("Add", [a, b], shape=[1, 5, 16])
    normalized = sketch.op("RMSNormalization", [total, sketch.weight("scale", 5, 16)], {"axis": 1}, shape=[1, 5, 16])
    assert apply(SkipNormsPass(), sketch.model(normalized)) == (False, ["Add", "RMSNormalization"])


def test_a_transposed_weight_is_stored_transposed_and_computed_only_when_written() -> None:
    sketch = Sketch()
    weight = sketch.weight("w", 24, 16)
    transposed = sketch.op("Transpose", [weight], {"perm": [1, 0]}, shape=[16, 24])
    product = sketch.op("MatMul", [sketch.input("x", [1, "s", 16]), transposed], shape=[1, "s", 24])
    model = sketch.model(product)
    assert apply(TransposedWeightsPass(), model) == (True, ["MatMul"])
    assert isinstance(model.graph.initializers["w.T"].const_value, ir.LazyTensor)


def test_a_head_tied_to_the_embedding_multiplies_by_the_stored_embedding() -> None:
    sketch = Sketch()
    table = sketch.weight("embedding", 24, 16)
    ids = ir.Value(
        name="ids",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([2]),
        const_value=ir.tensor(np.array([3, 7]), name="ids"),
    )
    sketch.weights.append(ids)
    rows = sketch.op("Gather", [table, ids], {"axis": 0}, shape=[2, 16])
    transposed = sketch.op("Transpose", [table], {"perm": [1, 0]}, shape=[16, 24])
    product = sketch.op("MatMul", [sketch.input("x", [1, "s", 16]), transposed], shape=[1, "s", 24])
    model = sketch.model(product, rows)
    modified, ops = apply(TransposedWeightsPass(), model)
    assert modified
    assert ops == ["Gather", "Gemm", "Reshape", "Reshape"]
    assert [name for name, value in model.graph.initializers.items() if value.const_value.nbytes >= 24 * 16 * 4] == [
        "embedding"
    ]


def axis(sketch: Sketch, number: int) -> ir.Value:
    array = np.array([number])
    value = ir.Value(
        name=f"axis_{number}",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([1]),
        const_value=ir.tensor(array, name=f"axis_{number}"),
    )
    sketch.weights.append(value)
    return value


@pytest.mark.parametrize(
    ("scaled", "remaining"), [(False, ["MatMul"]), (True, ["MatMul", "Mul", "Squeeze", "Unsqueeze"])]
)
def test_a_matmul_alone_between_two_reshapes_needs_neither(scaled: bool, remaining: list[str]) -> None:
    sketch = Sketch()
    first, weight = axis(sketch, 0), sketch.weight("w", 16, 24)
    tokens = sketch.op("Unsqueeze", [sketch.input("x", ["m", 16]), first], shape=[1, "m", 16])
    product = sketch.op("MatMul", [tokens, weight], shape=[1, "m", 24])
    if scaled:
        product = sketch.op("Mul", [product, product], shape=[1, "m", 24])
    logits = sketch.op("Squeeze", [product, first], shape=["m", 24])
    modified, ops = apply(FlatMatMulsPass(), sketch.model(logits))
    assert (modified, ops) == (not scaled, remaining)


def test_a_tied_head_on_a_matrix_is_one_matmul() -> None:
    sketch = Sketch()
    first, table = axis(sketch, 0), sketch.weight("embedding", 24, 16)
    rows = sketch.op("Gather", [table, first], {"axis": 0}, shape=[1, 16])
    tokens = sketch.op("Unsqueeze", [sketch.input("x", ["m", 16]), first], shape=[1, "m", 16])
    transposed = sketch.op("Transpose", [table], {"perm": [1, 0]}, shape=[16, 24])
    product = sketch.op("MatMul", [tokens, transposed], shape=[1, "m", 24])
    model = sketch.model(sketch.op("Squeeze", [product, first], shape=["m", 24]), rows)
    assert apply(FlatMatMulsPass(), model)[0]
    assert apply(TransposedWeightsPass(), model) == (True, ["Gather", "Gemm"])


def attention(sketch: Sketch, biased: int, shared: bool = True) -> ir.Model:
    """Attention over three projections, `biased` of them with a bias, of one input or of two."""
    x = sketch.input("x", [1, 1, 32])
    other = x if shared else sketch.input("y", [1, 1, 32])
    flat = []
    for index, (name, width) in enumerate((("q", 32), ("k", 16), ("v", 16))):
        product = sketch.op("MatMul", [x if index == 0 else other, sketch.weight(name, 32, width)], shape=[1, 1, width])
        if index < biased:
            product = sketch.op("Add", [product, sketch.weight(f"{name}_bias", width)], shape=[1, 1, width])
        flat.append(product)
    pages = [sketch.input(f"{kind}_pages", [2, 2, 4, 8]) for kind in ("key", "value")]
    places = [ir.tensor(np.array([[1]], np.int32), name="table"), ir.tensor(np.array([4]), name="lengths")]
    values = [
        ir.Value(name=t.name, type=ir.TensorType(t.dtype), shape=ir.Shape(t.shape), const_value=t) for t in places
    ]
    sketch.weights += values
    node = ir.node(
        "TidePagedAttention",
        [*flat, *pages, *values],
        attributes={"num_heads": 4, "kv_num_heads": 2},
        domain="tide",
        num_outputs=3,
        name="attention",
    )
    for value, name in zip(node.outputs, ("o", "new_key_pages", "new_value_pages"), strict=True):
        value.name = name
    sketch.nodes.append(node)
    return sketch.model(*node.outputs)


@pytest.mark.parametrize(
    ("biased", "remaining"), [(0, ["MatMul", "TidePagedAttention"]), (3, ["Add", "MatMul", "TidePagedAttention"])]
)
def test_projections_of_one_input_are_packed(biased: int, remaining: list[str]) -> None:
    assert apply(PackedProjectionsPass(), attention(Sketch(), biased)) == (True, remaining)


@pytest.mark.parametrize(("biased", "shared"), [(1, True), (0, False)])
def test_projections_that_do_not_match_stay(biased: int, shared: bool) -> None:
    modified, ops = apply(PackedProjectionsPass(), attention(Sketch(), biased, shared))
    assert not modified
    assert ops.count("MatMul") == 3


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("experts", [1, 4])
def test_rows_are_multiplied_by_their_expert(experts: int, transposed: int) -> None:
    """With experts that no row chose, and one that all rows chose; a token's experts read one row, then one each."""
    sketch = Sketch()
    rows = sketch.input("rows", ["t", 1, 6])
    expert = ir.Value(name="expert", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["t", 2]))
    sketch.inputs.append(expert)
    shapes = [(experts, 6, 5), (experts, 5, 7)] if transposed else [(experts, 5, 6), (experts, 7, 5)]
    value = rows
    for number, shape in enumerate(shapes):
        node = ir.node(
            "TideExpertMatMul",
            [value, expert, sketch.weight(f"w{number}", *shape)],
            attributes={"num_experts": experts, "transposed": transposed},
            domain="tide",
            name=f"product{number}",
        )
        value = node.outputs[0]
        value.name, value.type, value.shape = f"p{number}", ir.TensorType(FLOAT), ir.Shape(["t", 2, (5, 7)[number]])
        sketch.nodes.append(node)
    model = sketch.model(value)
    weights = [model.graph.initializers[f"w{number}"].const_value.numpy() for number in range(2)]
    if not transposed:
        weights = [weight.swapaxes(1, 2) for weight in weights]
    assert ExpertMatMulPass()(model).modified
    ops = [node.op_type for node in model.graph]
    assert ops.count("MatMul") == 2 * experts
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    for choice in ([[0, 0]], [[0, 0]] * 9, RNG.integers(0, experts, (9, 2)).tolist(), [[experts - 1, 0]]):
        x = RNG.normal(size=(len(choice), 1, 6)).astype(np.float32)
        (found,) = session.run(None, {"rows": x, "expert": np.array(choice, dtype=np.int64)})
        expected = np.stack(
            [[row[0] @ weights[0][e] @ weights[1][e] for e in each] for row, each in zip(x, choice, strict=True)]
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_pass_logs_what_it_changed_and_how_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logged(model: ir.Model, rewrite: ir.passes.PassBase) -> list[str]:
        caplog.clear()
        rewriting.run_passes(model, rewrite)
        return [record.getMessage() for record in caplog.records]

    caplog.set_level(logging.DEBUG, "tide_export")
    model = added_and_normalized()
    fused = "com.microsoft::SkipSimplifiedLayerNormalization"
    assert logged(model, SkipNormsPass()) == [f"SkipNormsPass: -2 Add, -2 RMSNormalization, +2 {fused}"]
    assert logged(model, SkipNormsPass()) == []
    rewriting.register(model.graph, ir.tensor([1.0], name="unused"))
    assert logged(model, common_passes.RemoveUnusedNodesPass()) == ["RemoveUnusedNodesPass: -1 FLOAT initializer"]

    caplog.set_level(logging.INFO, "tide_export")
    monkeypatch.delattr(rewriting, "Contents")
    assert logged(added_and_normalized(), SkipNormsPass()) == [], "counts nothing where nothing is logged"


def added_and_normalized() -> ir.Model:
    """Two times an addition of states, and its norm."""
    sketch = Sketch()
    total, other, weight = sketch.input("a", [1, "s", 16]), sketch.input("b", [1, "s", 16]), sketch.weight("scale", 16)
    for _ in range(2):
        total = sketch.op("Add", [total, other], shape=[1, "s", 16])
        other = sketch.op("RMSNormalization", [total, weight], {"axis": -1}, shape=[1, "s", 16])
    return sketch.model(other, total)


def test_a_pass_that_joins_nodes_otherwise_logs_how_many(caplog: pytest.LogCaptureFixture) -> None:
    class Swap(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            node = model.graph.node(0)
            a, b = node.inputs
            node.replace_input_with(0, b)
            node.replace_input_with(1, a)
            return ir.passes.PassResult(model, modified=True)

    caplog.set_level(logging.DEBUG, "tide_export")
    rewriting.run_passes(added_and_normalized(), Swap())
    assert caplog.messages == ["Swap: as many nodes of each operator, other inputs of 1"]
