"""Layers in one operator: the pass, the norms of every instruction set, and the operator against the nodes it replaces,
with the library and without it."""

import ctypes
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from ort_sessions import opened, operators_of

from tide_export.bundle.manifest import Quantization
from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import HALF
from tide_export.lower.onnxruntime.half_weights import half_matmul_function
from tide_export.lower.onnxruntime.layers import LayersPass, inline_layers
from tide_export.lower.onnxruntime.paged_attention import Form, paged_attention_function
from tide_export.lower.onnxruntime.quantized_matmuls import integer_matmul_function
from tide_export.names.operators import DOMAIN, OP_HALF_MATMUL, OP_INTEGER_LAYERS, OP_INTEGER_MATMUL, OP_LAYERS
from tide_export.quantize.rounding import round_to_nearest

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
SIZE, HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 64, 4, 2, 16, 16, 8
MATMULS = (*OP_HALF_MATMUL.values(), *OP_INTEGER_MATMUL.values())


class Maker:
    """Builds a graph node by node."""

    def __init__(self, matmul: str) -> None:
        self.matmul_name = matmul
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.rng = np.random.default_rng(3)

    def value(self, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self.weights.append(value)
        return value

    def vector(self, name: str, size: int = SIZE) -> ir.Value:
        return self.weight(ir.tensor(self.rng.standard_normal(size, dtype=np.float32), name=name))

    def node(self, op_type: str, inputs: list, width: int = SIZE, domain: str = "", outputs: int = 1, **attributes):
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs)
        node.name = f"n{len(self.nodes)}"
        self.nodes.append(node)
        for index, output in enumerate(node.outputs):
            output.name, output.type = f"{node.name}.{index}", ir.TensorType(FLOAT)
            output.shape = ir.Shape([1, "n", width])
        return node.outputs[0] if outputs == 1 else node.outputs

    def matmul(self, x: ir.Value, rows: int = SIZE) -> ir.Value:
        name = f"w{len(self.nodes)}"
        values = self.rng.standard_normal((rows, SIZE), dtype=np.float32) / 8
        half = {op: weights for weights, op in OP_HALF_MATMUL.items()}.get(self.matmul_name)
        if half is not None:
            tensor = ir.tensor(values.astype(HALF[half].numpy()), dtype=HALF[half], name=name)
            return self.node(self.matmul_name, [x, self.weight(tensor)], rows, DOMAIN)
        bits = {op: bits for bits, op in OP_INTEGER_MATMUL.items()}[self.matmul_name]
        blocks = round_to_nearest(values, Quantization("rtn", bits, 32, symmetric=True, accuracy_level=4))
        stored = [self.weight(ir.tensor(a, name=f"{name}.{i}")) for i, a in enumerate((blocks.packed, blocks.scales))]
        settings = {"K": SIZE, "N": rows, "bits": bits, "block_size": 32, "accuracy_level": 4}
        return self.node(self.matmul_name, [x, *stored], rows, DOMAIN, **settings)


def layer(matmul: str, norm: str) -> ir.Model:
    """A layer and a half: attention and two matmuls, with a bias, a residual stream, and an output in the middle."""
    make = Maker(matmul)
    x = make.value("x", FLOAT, 1, "n", SIZE)
    pages = [make.value(name, FLOAT, "p", KV_HEADS, PAGE, WIDTH) for name in ("key_pages", "value_pages")]
    table = make.value("page_table", INT32, "r", "j")
    lengths, starts = make.value("lengths", INT64, "r"), make.value("starts", INT64, "s")
    scale, shift = make.vector("scale"), make.vector("shift") if norm == "LayerNormalization" else None
    weights = [scale] if shift is None else [scale, shift]
    normalized = make.node(norm, [x, *weights], axis=-1, epsilon=1e-5)
    qkv = make.matmul(normalized, (HEADS + 2 * KV_HEADS) * WIDTH)
    attended = make.node(
        "TidePagedAttention", [qkv, None, None, *pages, table, lengths, starts], DOMAIN and SIZE, DOMAIN, 3,
        num_heads=HEADS, kv_num_heads=KV_HEADS,
    )  # fmt: skip
    for new, old in zip(attended[1:], pages, strict=True):
        new.name, new.shape = f"new_{old.name}", old.shape
    projected = make.node("Add", [make.matmul(attended[0]), make.vector("bias")])
    skip = {"RMSNormalization": "SkipSimplifiedLayerNormalization", "LayerNormalization": "SkipLayerNormalization"}
    both = make.node(skip[norm], [x, projected, *weights], SIZE, "com.microsoft", 4, epsilon=1e-5)
    both[1].name = both[2].name = ""
    inner = make.matmul(both[0])
    total = make.node("Add", [both[3], inner])
    outputs = [total, both[3], *attended[1:]]
    imports = {"": OPSET, DOMAIN: 1, "com.microsoft": 1}
    inputs = [x, *pages, table, lengths, starts]
    graph = ir.Graph(inputs, outputs, nodes=make.nodes, initializers=make.weights, opset_imports=imports, name="layers")
    half = {op: weights for weights, op in OP_HALF_MATMUL.items()}.get(matmul)
    attention = paged_attention_function("float32", Form.PACKED, ["starts"])
    attention.overload = ""
    function = half_matmul_function(half, OPSET) if half else integer_matmul_function(matmul)
    return ir.Model(graph, ir_version=11, functions=[attention, function])


def feeds_of(lengths: list[int], tokens: list[int]) -> dict[str, np.ndarray]:
    """Sequences of those lengths, whose last tokens are new; each has pages of its own."""
    rng = np.random.default_rng(len(lengths))
    longest = max(-(-length // PAGE) for length in lengths)
    pages = rng.permutation(len(lengths) * longest).astype(np.int32)
    shape = (len(pages), KV_HEADS, PAGE, WIDTH)
    return {
        "x": rng.standard_normal((1, sum(tokens), SIZE), dtype=np.float32),
        "key_pages": rng.standard_normal(shape, dtype=np.float32),
        "value_pages": rng.standard_normal(shape, dtype=np.float32),
        "page_table": pages.reshape(len(lengths), longest),
        "lengths": np.array(lengths),
        "starts": np.cumsum([0, *tokens]),
    }


@pytest.mark.parametrize("norm", ["RMSNormalization", "LayerNormalization"])
@pytest.mark.parametrize("matmul", MATMULS)
def test_the_operator_is_the_nodes(matmul: str, norm: str, tmp_path: Path) -> None:
    before, model = layer(matmul, norm), layer(matmul, norm)
    LayersPass()(model)
    name = OP_INTEGER_LAYERS if matmul in OP_INTEGER_MATMUL.values() else OP_LAYERS
    assert [(node.domain, node.op_type) for node in model.graph] == [(DOMAIN, name)]
    session, nodes, plain = opened(model, tmp_path, 2), opened(before, threads=2), opened(model, operators=False)
    rounded = 3e-2 if name == OP_INTEGER_LAYERS else 2e-4  # an input near a half is rounded up or down
    for lengths, tokens in (([5], [5]), ([40], [1]), ([33, 7, 90], [1, 7, 30]), ([4], [0])):
        feeds = feeds_of(lengths, tokens)
        y = session.run(None, feeds)
        for other in (nodes, plain):
            for one, expected in zip(y, other.run(None, feeds), strict=True):
                np.testing.assert_allclose(one, expected, rtol=2e-3, atol=rounded)
    ran = operators_of(session)
    if name == OP_INTEGER_LAYERS and name not in ran:
        pytest.skip("this CPU has no AVX2: the nodes ran")
    assert name in ran


@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_token_is_the_same_to_the_bit(matmul: str, threads: int) -> None:
    """Whatever is computed with it, and by how many threads."""
    model = layer(matmul, "RMSNormalization")
    LayersPass()(model)
    session, one = opened(model, threads=threads), opened(model, threads=1)
    feeds = feeds_of([33, 7, 90], [1, 7, 30])
    whole = session.run(None, feeds)
    for sequence, (begin, end) in enumerate(zip(feeds["starts"], feeds["starts"][1:], strict=False)):
        alone = feeds | {name: feeds[name][sequence : sequence + 1] for name in ("page_table", "lengths")}
        alone |= {"x": feeds["x"][:, begin:end], "starts": np.array([0, end - begin])}
        for y, expected in zip(one.run(None, alone)[:2], whole[:2], strict=True):
            np.testing.assert_array_equal(y, expected[:, begin:end])


def test_a_layer_is_written_so_that_one_can_read_it() -> None:
    model = layer("TideInt4MatMul", "RMSNormalization")
    LayersPass()(model)
    (node,) = model.graph
    assert node.attributes["nodes"].as_string().split("\n") == [
        "slots 64 128",
        "RMSNormalization s0 = i0 w1 epsilon=1e-05",
        "TideInt4MatMul s1 = s0 w2 w3",
        "TidePagedAttention s0 o0 o1 = s1 - - i4 i5 i6 i7 i8 num_heads=4 kv_num_heads=2",
        "TideInt4MatMul s1 = s0 w9 w10",
        "Add s0 = s1 w11",
        "SkipSimplifiedLayerNormalization s1 - - o2 = i0 s0 w1 epsilon=1e-05",
        "TideInt4MatMul s0 = s1 w12 w13",
        "Add o3 = o2 s0",
    ]


def test_inlined_they_are_the_nodes_again() -> None:
    before, model = layer("TideBf16MatMul", "RMSNormalization"), layer("TideBf16MatMul", "RMSNormalization")
    LayersPass()(model)
    inline_layers(model)
    assert [node.op_type for node in model.graph] == [node.op_type for node in before.graph]
    assert [value.name for value in model.graph.outputs] == [value.name for value in before.graph.outputs]


def test_what_reads_a_value_between_cuts_the_run_where_the_run_needs_it() -> None:
    """A node outside that only reads stays outside, after the run; one whose result the run reads ends it."""
    model = layer("TideBf16MatMul", "RMSNormalization")
    graph = model.graph
    attended = next(node for node in graph if node.op_type == "TidePagedAttention").outputs[0]
    reader = ir.node("Relu", [attended], name="reader")
    reader.outputs[0].name = "read"
    graph.insert_after(attended.producer(), reader)
    graph.outputs.append(reader.outputs[0])
    LayersPass()(model)
    assert [node.op_type for node in graph] == [OP_LAYERS, "Relu"]

    model = layer("TideBf16MatMul", "RMSNormalization")
    graph = model.graph
    attended = next(node for node in graph if node.op_type == "TidePagedAttention").outputs[0]
    reader = ir.node("Relu", [attended], name="reader")
    reader.outputs[0].name, reader.outputs[0].shape = "read", attended.shape
    reader.outputs[0].type = attended.type
    attended.replace_all_uses_with(reader.outputs[0])
    reader.replace_input_with(0, attended)
    graph.insert_after(attended.producer(), reader)
    LayersPass()(model)
    assert [node.op_type for node in graph] == [OP_LAYERS, "Relu", OP_LAYERS]


@pytest.mark.parametrize(
    ("shape", "kinds"), [([1], [OP_LAYERS]), ([1, 1], [OP_LAYERS]), ([3, SIZE], [OP_LAYERS, "Add"])]
)
def test_a_weight_that_is_not_the_same_for_all_tokens_is_added_by_onnx_runtime(
    shape: list[int], kinds: list[str]
) -> None:
    model = layer("TideBf16MatMul", "RMSNormalization")
    graph = model.graph
    bias = next(node for node in graph if node.op_type == "Add").inputs[1]
    bias.shape, bias.const_value = ir.Shape(shape), ir.tensor(np.ones(shape, np.float32), name=bias.name)
    LayersPass()(model)
    assert [node.op_type for node in graph][:2] == kinds


def test_two_residual_streams_are_two_runs() -> None:
    """Segments that one graph holds side by side are cut apart later."""
    model = layer("TideBf16MatMul", "RMSNormalization")
    other = layer("TideBf16MatMul", "RMSNormalization")
    nodes = list(other.graph)
    inputs = list(other.graph.inputs)
    for value in (*inputs, *other.graph.initializers.values(), *(v for n in nodes for v in n.outputs)):
        value.name = f"{value.name}.other" if value.name else value.name
    outputs = list(other.graph.outputs)
    weights = list(other.graph.initializers.values())
    other.graph.outputs.clear()
    other.graph.remove(nodes)
    other.graph.inputs.clear()
    other.graph.initializers.clear()
    model.graph.inputs.extend(inputs)
    for weight in weights:
        model.graph.register_initializer(weight)
    model.graph.extend(nodes)
    model.graph.outputs.extend(outputs)
    LayersPass()(model)
    assert [(node.op_type, node.overload) for node in model.graph] == [(OP_LAYERS, "0"), (OP_LAYERS, "1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slots 64\nSoftmax s0 = i0", "Softmax"),
        ("slots 64\nAdd s1 = i0 i0", "s1"),
        ("slots 64\nAdd s0 = i0 x3", "x3"),
        ("slots 64\nAdd s0 = i0 i0x", "i0x"),
        ("slots 64\nAdd s0 = i0 i", "i"),
        ("slots 64 -1\nAdd s0 = i0 i0", "-1"),
        ("slots 64\nRMSNormalization s0 = i0 w1 epsilon=small", "small"),
        ("slots 8\nRMSNormalization s0 = i0 w1\nAdd o0 = s0 i0", "wider than its attribute says"),
    ],
)
def test_what_it_cannot_read_is_refused(text: str, message: str) -> None:
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([1, "n", SIZE]))
    scale = ir.tensor(np.ones(SIZE, np.float32), name="scale")
    stored = ir.Value(name="scale", type=ir.TensorType(FLOAT), shape=scale.shape, const_value=scale)
    node = ir.node(OP_LAYERS, [x, stored], {"nodes": text}, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    imports = {"": OPSET, DOMAIN: 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[stored], opset_imports=imports, name="layers")
    with pytest.raises(Exception, match=message):
        opened(ir.Model(graph, ir_version=11)).run(None, {"x": np.zeros((1, 3, SIZE), np.float32)})


@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "baseline"])
@pytest.mark.parametrize("size", [1, 5, 16, 67, 576])
@pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
def test_a_norm(kernels: Path, instruction_set: str, size: int, layer_norm: bool) -> None:
    rng = np.random.default_rng(size)
    x, skip, scale, bias = rng.standard_normal((4, size), dtype=np.float32) + 0.5
    total = x + skip
    centered = total.astype(np.float64) - (total.mean(dtype=np.float64) if layer_norm else 0)
    exact = centered / np.sqrt(np.square(centered).mean() + 1e-5) * scale + (bias if layer_norm else 0)
    y, written = np.zeros(size, np.float32), np.zeros(size, np.float32)
    given = (x, skip, scale, bias if layer_norm else None, written, y)
    pointers = [None if array is None else ctypes.c_void_p(array.ctypes.data) for array in given]
    kernel = ctypes.CDLL(str(kernels)).norm
    if kernel(instruction_set.encode(), int(layer_norm), ctypes.c_int64(size), *pointers):
        pytest.skip(f"this CPU has no {instruction_set}")
    np.testing.assert_array_equal(written, total)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-6 * np.abs(scale).max())
