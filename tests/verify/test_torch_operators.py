"""Operators as PyTorch computes them, against ONNX's reference implementation, in the caller's memory."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tide_export.bundle.network_spec import ONE_TOKEN, NetworkSpec, Tensor
from tide_export.verify.pytorch.networks import TorchNetwork
from tide_export.verify.pytorch.operators import dequantize_linear, quantize_linear
from tide_export.verify.pytorch.program import Program, tensor_of

RNG = np.random.default_rng(0)
IN_HALF = ("MatMul", "RMSNormalization", "LayerNormalization", "RotaryEmbedding", "Attention", "TensorScatter", "Cast")


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def ints(high: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, high, shape)


class Host(np.ndarray):
    """An input that is a constant of the graph."""


def host(*values: int) -> np.ndarray:
    return whole(*values).view(Host)


Case = tuple[str, list[np.ndarray | None], dict[str, Any]]
CASES: list[Case] = [
    (
        "Attention",
        [floats(2, 4, 3, 8), floats(2, 2, 9, 8), floats(2, 2, 9, 8), ints(2, 2, 1, 3, 9) > 0],
        {"scale": 0.3},
    ),
    ("Attention", [floats(2, 4, 3, 8), floats(2, 4, 9, 8), floats(2, 4, 9, 8), floats(2, 4, 3, 9)], {}),
    ("Attention", [floats(1, 4, 3, 8), floats(1, 2, 9, 8), floats(1, 2, 9, 8), floats(1, 4, 3, 9)], {}),
    ("Cast", [floats(3)], {"to": onnx.TensorProto.INT64}),
    ("Clip", [floats(3), np.float32(-0.1), None], {}),
    ("Concat", [floats(2, 3), floats(2, 1)], {"axis": -1}),
    ("ConstantOfShape", [host(2, 3)], {"value": numpy_helper.from_array(np.array([2.5], np.float32))}),
    ("Div", [whole(7, -7), whole(2, 2)], {}),
    ("Expand", [floats(2, 1), host(3, 1, 4)], {}),
    ("Gather", [floats(5, 3), whole(-1, 0, 4).reshape(3, 1)], {"axis": 0}),
    ("Gather", [floats(2, 5), whole(3)], {"axis": 1}),
    ("GatherElements", [floats(2, 5), whole(1, -1).reshape(2, 1)], {"axis": 1}),
    ("GatherND", [floats(3, 4, 2), whole(1, 3, 0).reshape(3, 1)], {"batch_dims": 1}),
    ("GatherND", [floats(3, 4, 2), whole(1, 3, 0, 2).reshape(2, 2)], {}),
    ("Gelu", [floats(4)], {"approximate": "tanh"}),
    ("Gemm", [floats(3, 2), floats(3, 4), floats(4)], {"transA": 1, "alpha": 0.5, "beta": 2.0}),
    ("LayerNormalization", [floats(2, 3, 8), floats(8), floats(8)], {"epsilon": 1e-3}),
    ("LogSoftmax", [floats(2, 5)], {"axis": -1}),
    ("Mod", [whole(7, -7), whole(3, 3)], {}),
    ("Pad", [floats(2, 3), host(0, 1, 2, 0), np.float32(9)], {}),
    ("Pow", [np.abs(floats(3)), np.float32(2.5)], {}),
    ("RMSNormalization", [floats(2, 3, 8), floats(8)], {"epsilon": 1e-3}),
    ("ReduceMean", [floats(2, 3, 4), host(-1)], {"keepdims": 1}),
    ("ReduceSum", [floats(2, 3, 4), host(0, 2)], {"keepdims": 0}),
    ("Reshape", [floats(2, 6), host(0, 3, -1)], {}),
    ("RotaryEmbedding", [floats(2, 4, 3, 8), floats(20, 4), floats(20, 4), ints(20, 2, 3)], {}),
    ("RotaryEmbedding", [floats(2, 3, 32), floats(2, 3, 4), floats(2, 3, 4)], {"num_heads": 4, "interleaved": 1}),
    (
        "RotaryEmbedding",
        [floats(2, 4, 3, 8), floats(20, 2), floats(20, 2), ints(20, 2, 3)],
        {"rotary_embedding_dim": 4},
    ),
    ("ScatterElements", [floats(3, 4), ints(4, 3, 1), floats(3, 1)], {"axis": 1}),
    ("ScatterElements", [floats(3, 4), ints(4, 3, 2), floats(3, 2)], {"axis": 1, "reduction": "add"}),
    ("ScatterND", [floats(5, 2), whole(4, 1).reshape(2, 1), floats(2, 2)], {}),
    ("Slice", [floats(4, 6), host(1, -5), host(9, -1), host(0, 1), host(1, 2)], {}),
    ("Softmax", [floats(2, 5)], {"axis": 0}),
    ("Split", [floats(2, 7), host(3, 4)], {"axis": 1}),
    ("Squeeze", [floats(1, 3, 1), host(0, -1)], {}),
    ("TensorScatter", [floats(2, 3, 9, 4), floats(2, 3, 2, 4), whole(7, 0)], {"axis": -2}),
    ("TensorScatter", [floats(2, 9, 4), floats(2, 3, 4), whole(8, 1)], {"axis": 1, "mode": "circular"}),
    ("Tile", [floats(2, 3), host(2, 1)], {}),
    ("TopK", [floats(2, 7), host(3)], {"axis": -1}),
    ("Transpose", [floats(2, 3, 4)], {"perm": [2, 0, 1]}),
    ("Unsqueeze", [floats(3), host(0, -1)], {}),
    ("Where", [ints(2, 3) > 0, floats(3), floats(3)], {}),
]


def model_of(case: Case, outputs: list[np.ndarray], half: bool = False) -> onnx.ModelProto:
    """A graph of the operator; whose inputs are constants where they are `Host`."""
    op, arrays, attributes = case

    def described(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, kind, array.shape)

    entries = [(f"x{number}" if array is not None else "", array) for number, array in enumerate(arrays)]
    results = [f"y{number}" for number in range(len(outputs))]
    graph = helper.make_graph(
        [helper.make_node(op, [name for name, _ in entries], results, **attributes)],
        op,
        [described(name, array) for name, array in entries if array is not None and not isinstance(array, Host)],
        [described(name, array) for name, array in zip(results, outputs, strict=True)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in entries if isinstance(array, Host)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])


def computed(model: onnx.ModelProto, feeds: dict[str, np.ndarray], outputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs by PyTorch, in memory that is given to it."""
    program = Program(model, {}, torch.device("cpu"), "a network")

    def tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: Tensor(str(array.dtype), array.shape) for name, array in arrays.items()}

    given = {name: np.array(array, order="C") for name, array in feeds.items()}
    found = {f"y{number}": np.zeros(array.shape, array.dtype) for number, array in enumerate(outputs)}
    network = TorchNetwork(program, NetworkSpec("a network", tensors(given), tensors(found)))
    for _ in range(2):  # the second run of a shape has its shapes computed
        network.run({name: array.ctypes.data for name, array in (given | found).items()}, ONE_TOKEN)
    for name, array in feeds.items():
        np.testing.assert_array_equal(given[name], array)
    return list(found.values())


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)])
def test_an_operator_is_onnx_s_own(case: Case) -> None:
    op, arrays, _ = case
    count = 2 if op in ("Split", "TopK") else 1
    unknown = [np.zeros(0, np.float32)] * count
    feeds = {f"x{n}": array for n, array in enumerate(arrays) if array is not None and not isinstance(array, Host)}
    expected = ReferenceEvaluator(model_of(case, unknown)).run(None, feeds)
    found = computed(model_of(case, expected), feeds, expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    if op in IN_HALF:
        check_in_half(case, feeds, expected)


def check_in_half(case: Case, feeds: dict[str, np.ndarray], expected: list[np.ndarray]) -> None:
    """The same in bfloat16, which is float32's result with the rounding of bfloat16."""

    def half(array: np.ndarray | None) -> np.ndarray | None:
        return array.astype(ml_dtypes.bfloat16) if array is not None and array.dtype == np.float32 else array

    op, arrays, attributes = case
    rounded, results = [half(array) for array in arrays], [half(array) for array in expected]
    found = computed(
        model_of((op, rounded, attributes), results), {name: half(array) for name, array in feeds.items()}, results
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("chained", [False, True])
def test_a_buffer_is_updated_in_place_or_copied_to_another_address(chained: bool) -> None:
    update = floats(1, 2, 2, 4)
    nodes = [helper.make_node("TensorScatter", ["past", "new", "at"], ["between" if chained else "present"], axis=-2)]
    if chained:
        nodes.append(helper.make_node("TensorScatter", ["between", "new", "zero"], ["present"], axis=-2))
    shapes = {"past": (1, 2, 9, 4), "new": update.shape, "at": (1,), "zero": (1,)}
    kinds = {"past": np.float32, "new": np.float32, "at": np.int64, "zero": np.int64}
    values = {
        name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kinds[name])), shape)
        for name, shape in shapes.items()
    }
    result = helper.make_tensor_value_info("present", onnx.TensorProto.FLOAT, shapes["past"])
    graph = helper.make_graph(nodes, "update", list(values.values()), [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    program = Program(model, {}, torch.device("cpu"), "a network")
    inputs = {name: Tensor(np.dtype(kinds[name]).name, shape) for name, shape in shapes.items()}
    network = TorchNetwork(program, NetworkSpec("a network", inputs, {"present": inputs["past"]}))
    past, other, at, zero = floats(1, 2, 9, 4), floats(1, 2, 9, 4), whole(5), whole(0)
    expected = past.copy()
    expected[:, :, 5:7] = update
    if chained:
        expected[:, :, :2] = update
    addresses = {"past": past, "new": update, "at": at, "zero": zero, "present": other}
    before = past.copy()
    network.run({name: array.ctypes.data for name, array in addresses.items()}, ONE_TOKEN)
    np.testing.assert_array_equal(other, expected)
    np.testing.assert_array_equal(past, before)
    network.run({name: array.ctypes.data for name, array in (addresses | {"present": past}).items()}, ONE_TOKEN)
    np.testing.assert_array_equal(past, expected)


def test_fp8_saturates_and_rounds_to_even() -> None:
    x = np.concatenate([floats(200) * 10, np.float32([0, 1e-4, 1e4, -1e4, 17, 19])])
    expected = np.clip(x / np.float32(0.5), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale, zero = torch.tensor(0.5), torch.zeros((), dtype=torch.float8_e4m3fn)
    numbers = quantize_linear(torch.from_numpy(x), scale, zero)
    np.testing.assert_array_equal(numbers.float().numpy(), expected)
    np.testing.assert_array_equal(dequantize_linear(numbers, scale).numpy(), expected * np.float32(0.5))


def test_integers_of_4_bits_are_unpacked_and_dequantized_by_blocks() -> None:
    integers = RNG.integers(-8, 8, (9, 3)).astype(ml_dtypes.int4)  # an odd number of them
    tensor = numpy_helper.from_array(integers, "w")
    found = tensor_of(np.frombuffer(tensor.raw_data, np.uint8), tensor.data_type, tensor.dims)
    np.testing.assert_array_equal(found.numpy(), integers.astype(np.int8))
    scales = np.abs(floats(3, 3))
    expected = integers.astype(np.float32) * scales.repeat(3, 0)
    computed = dequantize_linear(found, torch.from_numpy(scales), axis=0, block_size=3)
    np.testing.assert_array_equal(computed.numpy(), expected)
