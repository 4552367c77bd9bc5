"""Segment networks with matrices in int4 and FP8: what they hold, and that they compute what PyTorch does with it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from families import build
from networks_runner import Runner
from tiny_engines import bound

from tide_export.bundle.file_names import network_file
from tide_export.bundle.manifest import Quantization
from tide_export.compose.cut import cut
from tide_export.lower.tensorrt.lower import check_pieces, networks_for_tensorrt
from tide_export.model.quantized_weights import Fp8Matrix
from tide_export.model.source import SourceModel
from tide_export.names.networks import HEAD, segment_name
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.fp8 import quantize_to_fp8, round_to_fp8
from tide_export.quantize.matrices import find_matrices
from tide_export.quantize.rounding import round_for_tensorrt
from tide_export.routers.random_routers import random_routers

CAPACITY, CHECKPOINT = 48, 2
HALF = np.dtype(np.float16)
INT4 = Quantization("rtn", 4, 32, True, 4)
TEXTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 500, 40)] for seed in range(4)]


def quantized(matrices: str) -> SourceModel:
    source = build("llama (3.1)")  # with biases
    if matrices == "fp8":
        quantize_to_fp8(source, TEXTS, HALF)
    else:
        quantize_model(source, INT4, (), round_for_tensorrt(HALF), outside=False)
    return source


@pytest.fixture(scope="module", params=["int4", "fp8"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, traces):
    """The kind of the matrices, the model that computes with them, its routers, and its networks' folder."""
    source, folder = quantized(request.param), tmp_path_factory.mktemp("networks")
    routers = random_routers(source, (CHECKPOINT,), range(3, 43), bottleneck=16)
    pieces = cut(traces(source, routers.checkpoints, bound(source)), CAPACITY)
    check_pieces(pieces, "fp16")
    for precision in ("fp16", "fp32"):
        networks = networks_for_tensorrt(pieces, routers.arrays(), None, CAPACITY, precision, source.quantized)
        assert networks.matrices == request.param
        (folder / precision).mkdir()
        networks.save(folder / precision)
    return request.param, source, routers, folder


@contextmanager
def rounded_inputs(source: SourceModel) -> Iterator[None]:
    """While open, the inputs of matrices in FP8 are rounded, in PyTorch."""
    assert source.quantized is not None

    def hook(matrix: Fp8Matrix):
        def rounded(_module, args: tuple) -> tuple:
            numbers = (args[0] / matrix.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return (numbers.float() * matrix.input_scale,)

        return rounded

    with ExitStack() as hooks:
        for layer in find_matrices(source).linear:
            for module, matrix in layer.items():
                block = source.quantized.blocks[matrix.name]
                if isinstance(block, Fp8Matrix):
                    hooks.enter_context(module.register_forward_pre_hook(hook(block)))
        yield


# In float16 its own rounding moves inputs to the next number of FP8, which is up to 1/8 away.
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_the_networks_compute_what_pytorch_does_with_the_same_numbers(made, precision: str, dtype: type) -> None:
    kind, source, routers, folder = made
    limit = {"int4": {"fp32": 1e-5, "fp16": 0.005}, "fp8": {"fp32": 1e-3, "fp16": 0.05}}[kind][precision]
    ids = np.array([text[:20] for text in TEXTS[:3]])
    logits, scores, _ = Runner(folder / precision, 3, dtype).full(ids, [0, 0, 0], [19, 19, 19])
    with rounded_inputs(source):
        states = source.run(torch.tensor(ids), [CHECKPOINT])
    expected = states.logits[:, -1].numpy()
    score = routers.routers[CHECKPOINT](routers.exit_state(source, CHECKPOINT, states.raw[CHECKPOINT]))[:, -1]
    assert np.abs(logits - expected).max() < limit * np.abs(expected).max()
    np.testing.assert_allclose(scores, score.detach().numpy(), atol=limit)
    if kind == "fp8" and precision == "fp32":
        unrounded = source.run(torch.tensor(ids), []).logits[:, -1].numpy()
        assert np.abs(logits - unrounded).max() > 10 * np.abs(logits - expected).max()


def test_the_networks_hold_what_modelopt_writes(made) -> None:
    """Integers in blocks along K and no zero points; in FP8 inputs too, and those that matmuls share are rounded once;
    embedding and head in half precision."""
    kind, source, _, folder = made
    assert source.quantized is not None
    network = onnx.load(str(folder / "fp16" / network_file(segment_name(0))))
    weights = {tensor.name: tensor for tensor in network.graph.initializer}
    stored = {name.removesuffix(".numbers") for name in weights if name.endswith(".numbers")}
    assert len(stored) == 14  # of two layers
    nodes = {op: [n for n in network.graph.node if n.op_type == op] for op in ("DequantizeLinear", "QuantizeLinear")}
    assert len(nodes["QuantizeLinear"]) == (8 if kind == "fp8" else 0)  # four a layer: q, k and v share one
    assert len(nodes["DequantizeLinear"]) == 14 + len(nodes["QuantizeLinear"])
    for name in stored:
        matrix, tensor = source.quantized.blocks[name], weights[f"{name}.numbers"]
        numbers = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        if kind == "int4":
            assert tensor.data_type == onnx.TensorProto.INT4
            scales = onnx.numpy_helper.to_array(weights[f"{name}.scales"])
            assert scales.dtype == np.float16
            assert scales.shape == (matrix.columns // 32, matrix.rows)
            assert (scales > 0).all()
            numbers *= scales.astype(np.float32).repeat(32, 0)
        else:
            assert tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN
            numbers *= np.float32(matrix.scale)
        np.testing.assert_array_equal(numbers.T, matrix.values())
    head = onnx.load(str(folder / "fp16" / network_file(HEAD)))
    assert {tensor.data_type for tensor in head.graph.initializer} <= {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}


def test_rounding_to_fp8_again_gives_the_same_weights() -> None:
    """As `validate` does, which has no text."""
    first, second = quantized("fp8"), build("llama (3.1)")
    error = round_to_fp8(second, HALF)
    assert 0.01 < error < 0.05
    for (name, one), (_, other) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_scales_for_tensorrt_are_positive_and_use_the_lowest_integer(half: type) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    weight[0, :32] = 0
    weight[1, 0], weight[2, 0] = 8, -8
    blocks = round_for_tensorrt(np.dtype(half))(weight, INT4)
    assert (blocks.scales > 0).all()
    np.testing.assert_array_equal(blocks.scales, blocks.scales.astype(half).astype(np.float32))
    assert blocks.scales[1, 0] == pytest.approx(8 / 7, rel=0.01)
    assert blocks.scales[2, 0] == 1
    assert blocks.signed()[2, 0] == -8
    np.testing.assert_array_equal(blocks.values(), (blocks.signed() * blocks.scales.repeat(32, 1)))
    assert np.abs(blocks.values() - weight).max(1)[3:].max() < blocks.scales[3:].max()


def test_onnx_runtime_multiplies_by_dequantized_integers_in_float32() -> None:
    """Without the option of `session_options` it rounds inputs to 8 bits, which shows more than float16 does."""
    from ort_sessions import session_options

    rng = np.random.default_rng(0)
    numbers = rng.integers(-8, 8, (64, 32)).astype(ml_dtypes.int4)
    scales = np.full((2, 32), 0.01, np.float16)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["dequantized"], axis=0, block_size=32),
            onnx.helper.make_node("MatMul", ["x", "dequantized"], ["y"]),
        ],
        "matmul",
        [value("x", onnx.TensorProto.FLOAT16, [3, 64])],
        [value("y", onnx.TensorProto.FLOAT16, [3, 32])],
        [onnx.numpy_helper.from_array(numbers, "w"), onnx.numpy_helper.from_array(scales, "s")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11)
    x = rng.standard_normal((3, 64)).astype(np.float16)
    (y,) = ort.InferenceSession(model.SerializeToString(), session_options(1)).run(None, {"x": x})
    expected = x.astype(np.float32) @ (numbers.astype(np.float32) * np.float32(np.float16(0.01)))
    assert np.abs(y - expected).max() < 1e-3 * np.abs(expected).max()
