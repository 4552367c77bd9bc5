"""The TensorRT classes, driven as TensorRT drives them (driver.cpp), on the kernels' CPU build.

TideRoute must give what the function's body gives in ONNX Runtime: the body is the reference, and the two must agree on
names, attributes and the order of inputs.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from kernel_checks import normed, tk
from kernel_runner import decode, encode, poison

from tide_export import names
from tide_export.compose.router_op import route_attributes, route_function
from tide_export.routers.router import RouterArrays
from tide_export.trace.tracer import OPSET

FIELD_FLOAT32, FIELD_INT32, FIELD_CHAR = 1, 5, 6  # nvinfer1::PluginFieldType
TYPES = {0: np.float32, 1: np.float16, 3: np.int32, 7: np.uint16, 8: np.int64}  # nvinfer1::DataType; uint16: bfloat16
CODES = {np.dtype(value): key for key, value in TYPES.items()}


class Field(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("type", c_int32), ("data", c_void_p), ("length", c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [("type", c_int32), ("rank", c_int32), ("dims", c_int64 * 4), ("data", c_void_p)]


class PluginError(Exception):
    pass


class Driver:
    def __init__(self, library):
        self.function = ctypes.CDLL(str(library)).drive
        self.function.restype = c_char_p
        self.function.argtypes = [c_char_p, POINTER(Field), c_int32, POINTER(Tensor), c_int32, POINTER(Tensor), c_int32]
        self.function.argtypes += [POINTER(c_int32)]

    def run(self, name, attributes, inputs, count, in_place=True):
        """Outputs of plugin `name`; where `in_place`, an aliased output is the input's memory."""
        kept, fields = [], []
        for key, value in attributes.items():
            if isinstance(value, str):
                text = ctypes.create_string_buffer(value.encode())
                kept.append(text)
                fields.append(Field(key.encode(), FIELD_CHAR, ctypes.addressof(text), len(value)))  # no final zero
            else:
                number = (ctypes.c_float if isinstance(value, float) else c_int32)(value)
                kept.append(number)
                kind = FIELD_FLOAT32 if isinstance(value, float) else FIELD_INT32
                fields.append(Field(key.encode(), kind, ctypes.addressof(number), 1))
        ins, outs, aliased = [tensor(array) for array in inputs], (Tensor * count)(), (c_int32 * count)()
        arguments = name.encode(), (Field * len(fields))(*fields), len(fields), (Tensor * len(ins))(*ins), len(ins)
        self.check(self.function(*arguments, outs, count, aliased))
        results = []
        for i, out in enumerate(outs):
            array = poison(tuple(out.dims[: out.rank]), TYPES[out.type])
            if in_place and aliased[i] >= 0:
                array = inputs[aliased[i]]
            results.append(array)
            outs[i].data = array.ctypes.data
        self.check(self.function(*arguments, outs, count, aliased))
        return results

    def check(self, problem):
        if problem is not None:
            raise PluginError(problem.decode())


def tensor(array):
    assert array.flags.c_contiguous
    dims = (c_int64 * 4)(*array.shape)
    return Tensor(CODES[array.dtype], array.ndim, dims, array.ctypes.data)


@pytest.fixture(scope="module")
def driver(emulated_plugins):
    return Driver(emulated_plugins)


def router(rng, hidden, bottleneck, shortlist):
    def weights(*shape):
        return rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

    parts = (weights(hidden, shortlist) * 3, weights(2, bottleneck)) if shortlist else (None, None)
    return RouterArrays(weights(hidden, bottleneck), weights(bottleneck, 1), 0.3, *parts)


def route_inputs(arrays, threshold):
    found = [np.array([threshold], np.float32), arrays.down, arrays.up, np.array([arrays.bias], np.float32)]
    return found + ([] if arrays.shortlist is None else [arrays.shortlist, arrays.confidence])


def onnxruntime_route(arrays, states, threshold):
    """Score and exit of the function's body."""
    inputs = [states, *route_inputs(arrays, threshold)]
    values = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(x.shape))
        for i, x in enumerate(inputs)
    ]
    node = ir.node(names.OP_ROUTE, values, attributes=route_attributes(), domain=names.DOMAIN, num_outputs=2)
    for value, name, kind in zip(node.outputs, ("score", "exit"), (ir.DataType.FLOAT, ir.DataType.BOOL), strict=True):
        value.name, value.type = name, ir.TensorType(kind)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": OPSET, names.DOMAIN: 1}, name="route")
    model = ir.to_proto(ir.Model(graph, ir_version=10, functions=[route_function(arrays)]))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: x for value, x in zip(values, inputs, strict=True)})


@pytest.mark.parametrize("shortlist", [0, 2, 256])
@pytest.mark.parametrize("batch", [1, 5])
def test_route_equals_the_function_s_body(driver, batch, shortlist):
    rng = np.random.default_rng(batch + shortlist)
    arrays = router(rng, 96, 24, shortlist)
    states = rng.normal(size=(batch, 1, 96)).astype(np.float32)
    expected, leaves = onnxruntime_route(arrays, states, 0.5)
    attributes = {key: value for key, value in route_attributes().items() if not key.startswith("plugin_")}
    score, exits = driver.run(names.OP_ROUTE, attributes, [states, *route_inputs(arrays, 0.5)], 2)
    assert score.shape == exits.shape == (batch, 1, 1)
    np.testing.assert_allclose(score, expected, atol=2e-6)
    assert np.array_equal(exits != 0, leaves)


@pytest.mark.parametrize("shortlist", [0, 9])
@pytest.mark.parametrize(
    ("norm", "kind", "shift"),
    [("rms", tk.NORM_RMS, False), ("layer", tk.NORM_LAYER, False), ("layer", tk.NORM_LAYER, True)],
)
def test_route_finds_its_norm_s_weights_after_the_shortlist(driver, norm, kind, shift, shortlist):
    rng = np.random.default_rng(shortlist)
    arrays = router(rng, 96, 24, shortlist)
    states = rng.normal(1, 2, (3, 1, 96)).astype(np.float32)
    weights = {"scale": rng.normal(1, 0.3, 96).astype(np.float32)}
    if shift:
        weights["shift"] = rng.normal(0, 0.3, 96).astype(np.float32)
    expected, _ = onnxruntime_route(arrays, normed(states, kind, 1e-3, weights, 1.0).astype(np.float32), 0.5)
    attributes = {"norm": norm, "epsilon": 1e-3, "scale_offset": 1.0}
    inputs = [states, *route_inputs(arrays, 0.5), *weights.values()]
    score, _ = driver.run(names.OP_ROUTE, attributes, inputs, 2)
    np.testing.assert_allclose(score, expected, atol=5e-6)


@pytest.mark.parametrize("kind", [tk.FLOAT16, tk.BFLOAT16])
@pytest.mark.parametrize("weights_kind", ["states'", "float32"])
def test_route_takes_16_bit_states(driver, kind, weights_kind):
    rng = np.random.default_rng(kind)
    arrays = router(rng, 96, 24, 9)
    states = encode(rng.normal(size=(2, 1, 96)), kind)
    threshold, *weights = route_inputs(arrays, 0.5)
    if weights_kind != "float32":
        weights = [encode(array, kind) for array in weights]
    score, exits = driver.run(names.OP_ROUTE, {}, [states, threshold, *weights], 2)
    expected, leaves = onnxruntime_route(arrays, decode(states).astype(np.float32), 0.5)
    np.testing.assert_allclose(score, expected, atol=5e-6 if weights_kind == "float32" else 2e-2)
    assert np.array_equal(exits != 0, leaves)


@pytest.mark.parametrize(
    ("attributes", "change", "message"),
    [
        ({"norm": "group"}, {}, "not none, rms or layer"),
        ({"colour": 1}, {}, "no attribute colour"),
        ({"epsilon": 1}, {}, "epsilon is of the wrong type"),
        ({}, {2: (96, 23)}, "down is not"),
        ({}, {3: (25, 1)}, "up is not"),
        ({}, {1: (3,)}, "neither one threshold nor one per row"),
        ({}, {5: (95, 9)}, "shortlist is not"),
        ({}, {6: (3, 24)}, "confidence is not"),
        ({"norm": "rms"}, {}, "wrong number of inputs"),
        ({}, {0: (2, 1, 90)}, "down is not"),
    ],
)
def test_route_reports_errors(driver, attributes, change, message):
    if change == {2: (96, 23)}:
        message = "up is not"  # 23 is taken for the bottleneck
    inputs = [np.zeros((2, 1, 96), np.float32), *route_inputs(router(np.random.default_rng(0), 96, 24, 9), 0.5)]
    for index, shape in change.items():
        inputs[index] = np.zeros(shape, np.float32)
    with pytest.raises(PluginError, match=message):
        driver.run(names.OP_ROUTE, attributes, inputs, 2)


def test_types_that_do_not_go_together_are_refused(driver):
    inputs = [np.zeros((2, 1, 96), np.float32), *route_inputs(router(np.random.default_rng(0), 96, 24, 0), 0.5)]
    inputs[2] = inputs[2].astype(np.float16)
    with pytest.raises(PluginError, match="tensor 2 not supported"):
        driver.run(names.OP_ROUTE, {}, inputs, 2)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("lens", [False, True])
def test_exit_scatter(driver, in_place, lens):
    rng = np.random.default_rng(3)
    rows, hidden, rank = 5, 40, 6

    def array(*shape):
        return rng.normal(0, 0.5, shape).astype(np.float32)

    states, output = array(rows, hidden), array(4, hidden)
    exits = np.array([1, 0, 1, 1, 1], np.int32)
    destination = np.array([2, 1, 0, 3, 9], np.int32)
    layers, counts = np.array([0, 0, 0, 4], np.int32), np.zeros(3, np.int64)
    lens_weights = [array(hidden, rank), array(rank, hidden), array(hidden)] if lens else []
    scale, shift = array(hidden), array(hidden)
    expected, before = output.copy(), output.copy()
    x = states.astype(np.float64)
    if lens:
        x = x + x @ lens_weights[0] @ lens_weights[1] + lens_weights[2]
    x = normed(x, tk.NORM_LAYER, 1e-5, {"scale": scale, "shift": shift}, 0.0)
    expected[2], expected[0] = x[0], x[2]  # row 3's destination is taken, row 4 has none

    attributes = {"norm": "layer", "epsilon": 1e-5, "layer": 6, "checkpoint": 1}
    inputs = [states, exits, destination, output, layers, counts, *lens_weights, scale, shift]
    out, out_layers, out_counts = driver.run("TideExitScatter", attributes, inputs, 3, in_place)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert out_layers.tolist() == [6, 0, 6, 4]
    assert out_counts.tolist() == [0, 2, 0]
    assert (out is output) == in_place
    assert in_place or np.array_equal(output, before), "an input that is not aliased is not written to"


def test_compact(driver):
    states = np.arange(21, dtype=np.float32).reshape(7, 3)
    exits = np.array([0, 1, 1, 0, 0, 1, 0], np.int32)
    staying, leaving, stay, leave, stay_count, leave_count = driver.run("TideCompact", {}, [states, exits], 6)
    assert stay_count == 4
    assert leave_count == 3
    assert stay_count.ndim == leave_count.ndim == 0
    assert np.array_equal(staying[:4], states[exits == 0])
    assert np.array_equal(leaving[:3], states[exits == 1])
    assert stay[:4].tolist() == [0, 3, 4, 6]
    assert leave[:3].tolist() == [1, 2, 5]


@pytest.mark.parametrize("in_place", [True, False])
def test_gather_pending(driver, in_place):
    states = np.arange(12, dtype=np.float16).reshape(2, 2, 3)
    take, lengths = np.array([1, 0], np.int32), np.array([10, 20], np.int32)
    pending, counts = np.full((2, 4, 3), -1, np.float16), np.array([1, 2], np.int32)
    inputs = [states, take, lengths, pending, counts]
    out, out_counts, positions = driver.run("TideGatherPending", {}, inputs, 3, in_place)
    assert np.array_equal(out[0, 1:3], states[0])
    assert (out[0, [0, 3]] == -1).all()
    assert (out[1] == -1).all()
    assert out_counts.tolist() == [3, 2]
    assert positions.tolist() == [[10, 11, 12, -1], [20, 21, -1, -1]]


def test_no_plugin_has_the_name_of_an_onnx_operator():
    """TensorRT ignores the domain."""
    operators = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    assert not operators & {"TideRoute", "TideExitScatter", "TideCompact", "TideGatherPending"}
