"""The operators for matrices in 4 and 8 bits: the products of MatMulNBits, whatever is computed with a row."""

import ctypes
import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from ort_sessions import opened, operators_of, register_operators

from tide_export.bundle.manifest import Quantization
from tide_export.lower.onnxruntime.quantized_matmuls import integer_matmul_function
from tide_export.model.quantized_weights import Blocks
from tide_export.names.operators import DOMAIN, OP_INTEGER_MATMUL, OP_OUTLIER_MATMUL
from tide_export.quantize.outliers import add_outliers
from tide_export.quantize.rounding import round_to_nearest

OUTLIERS = np.arange(3, 67, dtype=np.int64) * 4  # 64 of 288 columns


def matrix(rows: int, columns: int, block_size: int, bits: int = 4) -> Blocks:
    values = np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
    return round_to_nearest(values, Quantization("rtn", bits, block_size, symmetric=True, accuracy_level=4))


def model(blocks: Blocks, columns: int) -> bytes:
    """x [m, 1, columns] times `blocks`."""
    arrays = {"integers": blocks.packed, "scales": blocks.scales}
    op = OP_INTEGER_MATMUL[blocks.bits]
    if blocks.outliers is not None:
        op, arrays["outliers"] = OP_OUTLIER_MATMUL, blocks.outliers
    stored = [
        ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        for name, tensor in ((name, ir.tensor(array, name=name)) for name, array in arrays.items())
    ]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["m", 1, columns]))
    attributes = {"K": blocks.columns, "N": blocks.rows, "bits": blocks.bits}
    attributes |= {"block_size": blocks.block_size, "accuracy_level": 4}
    node = ir.node(op, [x, *stored], attributes, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 23, DOMAIN: 1, "com.microsoft": 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=stored, opset_imports=imports, name="product")
    return ir.to_proto(ir.Model(graph, ir_version=11, functions=[integer_matmul_function(op)])).SerializeToString()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("n_size", "k_size", "block_size"),
    [
        (1, 16, 16),
        (38, 700, 16),
        (64, 576, 32),
        (41, 1000, 32),
        (9, 80, 64),
        (67, 1100, 64),
        (39, 400, 128),
        (37, 700, 256),
    ],
)
def test_the_operator_is_the_function(n_size: int, k_size: int, block_size: int, bits: int, tmp_path: Path) -> None:
    proto = model(matrix(n_size, k_size, block_size, bits), k_size)
    session, plain = opened(proto, tmp_path), opened(proto, operators=False)
    x = np.random.default_rng(1).standard_normal((21, 1, k_size), dtype=np.float32)
    x[3] = 0
    (expected,) = plain.run(None, {"x": x})
    (whole,) = session.run(None, {"x": x})
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    for rows in (0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 17, 20):  # not even rounding depends on how many rows there are
        np.testing.assert_array_equal(session.run(None, {"x": x[:rows]})[0], whole[:rows])
    if OP_INTEGER_MATMUL[bits] not in operators_of(session):
        pytest.skip("this CPU has no AVX2: MatMulNBits ran")


def with_outliers(rows: int, outliers: np.ndarray = OUTLIERS) -> tuple[np.ndarray, Blocks]:
    """Weights of 288 columns, and those rounded."""
    weight = np.random.default_rng(rows).standard_normal((rows, 288), dtype=np.float32)
    settings = Quantization("rtn", 4, 32, symmetric=True, accuracy_level=4)
    return weight, add_outliers(round_to_nearest(weight, settings), weight, outliers, settings, round_to_nearest)


def test_the_operator_multiplies_outliers_by_both_their_columns(tmp_path: Path) -> None:
    weight, blocks = with_outliers(70)
    assert (blocks.columns, blocks.inputs, blocks.packed.shape) == (352, 288, (70, 11, 16))
    proto = model(blocks, 288)
    session, plain = opened(proto, tmp_path), opened(proto, operators=False)
    x = np.random.default_rng(1).standard_normal((21, 1, 288), dtype=np.float32)
    x[:, :, OUTLIERS] *= 50
    (expected,), (whole,) = plain.run(None, {"x": x}), session.run(None, {"x": x})
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(whole, x @ blocks.values().T, rtol=0, atol=0.02 * np.abs(expected).max())
    for rows in (0, 1, 5, 6, 17):
        np.testing.assert_array_equal(session.run(None, {"x": x[:rows]})[0], whole[:rows])
    single = np.abs(x @ round_to_nearest(weight, Quantization("rtn", 4, 32, True, 4)).values().T - x @ weight.T).mean()
    assert np.abs(x @ blocks.values().T - x @ weight.T).mean() < 0.2 * single
    if OP_OUTLIER_MATMUL not in operators_of(session):
        pytest.skip("this CPU has no AVX2: the function ran")


@pytest.mark.parametrize("wrong", [288, -1])
def test_the_operator_refuses_outliers_that_are_no_columns(wrong: int) -> None:
    _, blocks = with_outliers(8)
    outliers = OUTLIERS.copy()
    outliers[5] = wrong
    session = opened(model(replace(blocks, outliers=outliers), 288))
    with pytest.raises(Exception, match=r"TideInt4OutlierMatMul takes numbers of columns|indices element out of data"):
        session.run(None, {"x": np.zeros((1, 1, 288), np.float32)})


def test_the_operator_refuses_another_width() -> None:
    session = opened(model(matrix(4, 64, 32), 96))
    with pytest.raises(Exception, match=r"TideInt4MatMul takes x|K"):
        session.run(None, {"x": np.zeros((1, 1, 96), np.float32)})


def test_sessions_that_follow_each_other_do_not_mix_up_their_weights() -> None:
    """Memory is used again: other weights are then where those of a session before were."""
    x = np.random.default_rng(2).standard_normal((3, 1, 64), dtype=np.float32)
    for _ in range(20):
        values = np.random.default_rng().standard_normal((64, 64), dtype=np.float32)
        proto = model(round_to_nearest(values, Quantization("rtn", 4, 32, symmetric=True, accuracy_level=4)), 64)
        y, expected = (opened(proto, operators=own).run(None, {"x": x})[0] for own in (True, False))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_sessions_on_the_same_weights_share_one_copy() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (8192, 128, 16), np.uint8)
    blocks = Blocks(packed, np.ones((8192, 128), np.float32), None, 4096, 4)
    megabytes = (blocks.packed.nbytes + blocks.scales.nbytes) >> 20
    proto = model(blocks, 4096)
    stored = ir.from_proto(onnx.ModelProto.FromString(proto)).graph.initializers
    arrays = [(name, np.asarray(value.const_value.numpy())) for name, value in stored.items() if value.const_value]

    def growth(shared: bool) -> int:
        """Private megabytes of three sessions more."""
        values = [(name, ort.OrtValue.ortvalue_from_numpy(array)) for name, array in arrays]
        sessions, before = [], 0
        for _ in range(4):
            options = ort.SessionOptions()
            register_operators(options)
            for name, value in values if shared else []:
                options.add_initializer(name, value)
            sessions.append(ort.InferenceSession(proto, options))
            sessions[-1].run(None, {"x": np.ones((1, 1, 4096), np.float32)})
            before = before or private_megabytes()
        return private_megabytes() - before

    assert megabytes >= 20
    assert growth(shared=True) < growth(shared=False) - 2 * megabytes


def private_megabytes() -> int:
    """Without what earlier work left free, which would be taken again without growth."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Private_Clean:"))) >> 10
