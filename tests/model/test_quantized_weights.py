"""Blocks of integers stand for what ONNX Runtime multiplies by, whatever their size, bits and zero points."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tide_export.bundle.manifest import Quantization
from tide_export.model.quantized_weights import Blocks
from tide_export.quantize.rounding import round_to_nearest


def settings(bits: int = 4, block_size: int = 32, symmetric: bool = True) -> Quantization:
    return Quantization("rtn", bits, block_size, symmetric, 1)


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def multiplied(x: np.ndarray, blocks: Blocks) -> np.ndarray:
    """x [.., K] times the matrix, by MatMulNBits in float32."""
    arrays = {"b": blocks.packed, "scales": blocks.scales} | ({} if blocks.zeros is None else {"zeros": blocks.zeros})
    node = helper.make_node(
        "MatMulNBits",
        ["x", *arrays],
        ["y"],
        domain="com.microsoft",
        K=blocks.columns,
        N=blocks.rows,
        bits=blocks.bits,
        block_size=blocks.block_size,
        accuracy_level=1,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, blocks.columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, blocks.rows])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "block_size", "columns"), [(4, 32, 96), (8, 16, 64), (4, 16, 40), (8, 128, 72)])
def test_the_values_are_what_onnx_runtime_multiplies_by(
    bits: int, block_size: int, columns: int, symmetric: bool
) -> None:
    weight = matrix(24, columns)
    blocks = round_to_nearest(weight, settings(bits, block_size, symmetric))
    assert (blocks.rows, blocks.columns, blocks.block_size) == (24, columns, block_size)
    assert (blocks.zeros is None) == symmetric
    x = matrix(3, columns, seed=1)
    np.testing.assert_allclose(multiplied(x, blocks), x @ blocks.values().T, atol=1e-4)
    steps = np.abs(blocks.scales).repeat(block_size, axis=1)[:, :columns]
    inside = np.abs(weight) <= steps * (2 ** (bits - 1) - 1)  # a symmetric range ends one step early on one side
    assert inside.mean() > 0.8
    assert ((np.abs(blocks.values() - weight) <= steps * 0.501) | (~inside & symmetric)).all(), "the nearest"
    assert np.abs(blocks.values() - weight).mean() < 0.3 * steps.mean()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_given_integers_are_packed_as_onnx_runtime_unpacks_them(bits: int, symmetric: bool) -> None:
    rng = np.random.default_rng(3)
    integers = rng.integers(0, 2**bits, (8, 40), dtype=np.uint8)
    scales = rng.uniform(0.1, 1, (8, 3)).astype(np.float32)
    zeros = rng.integers(0, 2**bits, (8, 3), dtype=np.uint8)
    blocks = Blocks.from_integers(integers, scales, zeros, settings(bits, 16, symmetric))
    middle = 2 ** (bits - 1) if symmetric else zeros.repeat(16, axis=1)[:, :40].astype(np.float32)
    expected = (integers.astype(np.float32) - middle) * scales.repeat(16, axis=1)[:, :40]
    np.testing.assert_allclose(blocks.values(), expected, rtol=1e-6)
    x = matrix(2, 40)
    np.testing.assert_allclose(multiplied(x, blocks), x @ expected.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_are_split_without_rounding(symmetric: bool) -> None:
    whole = round_to_nearest(matrix(12, 48), settings(symmetric=symmetric))
    parts = whole.split([4, 2, 6])
    assert [part.rows for part in parts] == [4, 2, 6]
    np.testing.assert_array_equal(whole.values(), np.concatenate([part.values() for part in parts]))


def test_a_row_of_zeros_stays_zero() -> None:
    weight = matrix(4, 32)
    weight[2] = 0
    for symmetric in (True, False):
        values = round_to_nearest(weight, settings(symmetric=symmetric)).values()
        assert not values[2].any()
        assert np.isfinite(values).all()
