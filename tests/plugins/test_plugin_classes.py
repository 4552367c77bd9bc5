"""The TensorRT class, driven as TensorRT drives it (driver.cpp), on the kernel's CPU build.

TideExit must give what the function's body gives in ONNX Runtime: the body is the reference, and the two must agree on
names, attributes and the order of inputs.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from kernel_runner import decode, encode, poison, tk

from tide_export.compose.exit_op import exit_attributes, exit_function
from tide_export.compose.segments import OPSET
from tide_export.names import segment_networks as names
from tide_export.names.operators import DOMAIN, OP_EXIT

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
        opened = ctypes.CDLL(str(library))
        self.function, self.copied_bytes = opened.drive, opened.tide_plugins_copied_bytes
        self.copied_bytes.restype = c_int64
        self.function.restype = c_char_p
        self.function.argtypes = [c_char_p, POINTER(Field), c_int32, POINTER(Tensor), c_int32, POINTER(Tensor), c_int32]
        self.function.argtypes += [POINTER(c_int32)]

    def run(self, attributes, inputs, in_place=True):
        """The three outputs of TideExit; `in_place`, the first is the memory of input 3."""
        name, count = OP_EXIT, 3
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
            assert aliased[i] == (EXIT_STATES if i == 0 else -1), "the exit states are updated in place"
            if in_place and i == 0:
                array = inputs[3]
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
def driver(emulated):
    return Driver(emulated / "libtide_plugins_emulated.so")


SLOTS, TOKENS, HIDDEN, ROWS = 5, 3, 96, 4
STATES, LAST_TOKENS, THRESHOLDS, EXIT_STATES, DOWN = range(5)


@dataclass(frozen=True)
class Form:
    """What a call of TideExit has."""

    norm: str = "rms"
    shift: bool = False
    lens: bool = True
    shortlist: int = 9

    @property
    def attributes(self):
        found = exit_attributes(self.norm, 1e-3, self.lens, self.shortlist > 0)
        return {key: value for key, value in found.items() if not key.startswith("plugin_")}

    def inputs(self, seed=0):
        """float32, in order."""
        rng = np.random.default_rng(seed)

        def weights(*shape):
            return rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

        thresholds = np.array([0.0, 2.0, 0.5, 0.0, 0.5], np.float32)
        found = [
            rng.normal(0.5, 2, (SLOTS, TOKENS, HIDDEN)).astype(np.float32),
            rng.integers(0, TOKENS, SLOTS),
            thresholds,
            rng.normal(size=(SLOTS, 1, ROWS, HIDDEN)).astype(np.float32),
            *(weights(HIDDEN, 24), weights(24, 1), np.array([0.3], np.float32)),
        ]
        if self.shortlist:
            found += [weights(HIDDEN, self.shortlist) * 3, weights(2, 24)]
        if self.lens:
            found += [weights(HIDDEN, 6), weights(6, HIDDEN), weights(HIDDEN)]
        if self.norm != "none":
            found += [weights(HIDDEN) + 1] + ([weights(HIDDEN)] if self.shift else [])
        return found


def by_onnxruntime(form, inputs):
    """The outputs of the function's body."""
    kinds = {np.dtype(np.float32): ir.DataType.FLOAT, np.dtype(np.int64): ir.DataType.INT64}
    values = [
        ir.Value(name=f"x{i}", type=ir.TensorType(kinds[x.dtype]), shape=ir.Shape(x.shape))
        for i, x in enumerate(inputs)
    ]
    attributes = exit_attributes(form.norm, 1e-3, form.lens, form.shortlist > 0)
    node = ir.node(OP_EXIT, values, attributes=attributes, domain=DOMAIN, num_outputs=3)
    types = (ir.DataType.FLOAT, ir.DataType.FLOAT, ir.DataType.INT32)
    for value, name, kind in zip(node.outputs, ("states", "score", "exits"), types, strict=True):
        value.name, value.type = name, ir.TensorType(kind)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name="exit")
    model = ir.to_proto(ir.Model(graph, ir_version=11, functions=[exit_function(node, OPSET)]))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: x for value, x in zip(values, inputs, strict=True)})


def check(found, expected, inputs, tolerance):
    """Equal where anyone reads: scores, verdicts, the exit state of the slots that exit, and all other rows."""
    states, score, exits = found
    assert states.shape == inputs[EXIT_STATES].shape
    assert score.shape == exits.shape == (SLOTS,)
    np.testing.assert_allclose(score, expected[1], atol=tolerance)
    assert np.array_equal(exits, expected[2])
    assert 0 < exits.sum() < SLOTS
    read = np.ones((SLOTS, 1, ROWS), bool)
    read[:, :, names.DUMP_ROW] = False
    np.testing.assert_allclose(decode(states)[read], expected[0][read], atol=tolerance * 5, rtol=tolerance)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "form",
    [Form(), Form("layer", shift=True), Form("layer", lens=False), Form("none"), Form("none", lens=False, shortlist=0)],
    ids=str,
)
def test_it_equals_the_function_s_body(driver, form, in_place):
    inputs = form.inputs()
    expected = by_onnxruntime(form, inputs)
    before = inputs[EXIT_STATES].copy()
    found = driver.run(form.attributes, inputs, in_place)
    check(found, expected, inputs, 2e-6)
    assert (found[0] is inputs[EXIT_STATES]) == in_place
    assert in_place or np.array_equal(inputs[EXIT_STATES], before), "an input in other memory is not written to"
    assert driver.copied_bytes() == (0 if in_place else before.nbytes)
    assert driver.copied_bytes() == 0, "since the last call"


@pytest.mark.parametrize("kind", [tk.FLOAT16, tk.BFLOAT16])
def test_16_bit_states_with_the_router_in_float32(driver, kind):
    form = Form()
    inputs = form.inputs()
    half = [STATES, EXIT_STATES, *range(9, len(inputs))]
    for index in half:
        inputs[index] = encode(inputs[index], kind)
    wide = [decode(x).astype(np.float32) if i in half else x for i, x in enumerate(inputs)]
    check(driver.run(form.attributes, inputs), by_onnxruntime(form, wide), inputs, 5e-3 if kind == tk.FLOAT16 else 4e-2)


@pytest.mark.parametrize(
    ("attributes", "change", "message"),
    [
        ({"norm": "group"}, {}, "not none, rms or layer"),
        ({"lens": 2}, {}, "lens is neither 0 nor 1"),
        ({"colour": 1}, {}, "no attribute colour"),
        ({"epsilon": 1}, {}, "epsilon is of the wrong type"),
        ({}, {LAST_TOKENS: (4,)}, "last_tokens is not"),
        ({}, {THRESHOLDS: (3,)}, "thresholds is not"),
        ({}, {EXIT_STATES: (SLOTS, 1, ROWS, 95)}, "exit_states is not"),
        ({}, {EXIT_STATES: (SLOTS, ROWS, HIDDEN)}, "the exit states are not"),
        ({}, {DOWN: (95, 24)}, "down is not"),
        ({}, {DOWN + 1: (25, 1)}, "up is not"),
        ({}, {DOWN + 3: (95, 9)}, "shortlist is not"),
        ({}, {DOWN + 4: (3, 24)}, "confidence is not"),
        ({}, {DOWN + 6: (7, HIDDEN)}, "lens_up is not"),
        ({}, {DOWN + 7: (95,)}, "lens_bias is not"),
        ({}, {DOWN + 8: (95,)}, "a norm's weight is not"),
        ({"norm": "none"}, {}, "wrong number of inputs"),
        ({"shortlist": 0}, {}, "wrong number of inputs"),
    ],
)
def test_it_reports_errors(driver, attributes, change, message):
    form = Form()
    inputs = form.inputs()
    for index, shape in change.items():
        inputs[index] = np.zeros(shape, inputs[index].dtype)
    with pytest.raises(PluginError, match=message):
        driver.run(form.attributes | attributes, inputs)


def test_types_that_do_not_go_together_are_refused(driver):
    for index, dtype in ((EXIT_STATES, np.float16), (DOWN, np.float16), (LAST_TOKENS, np.int32)):
        inputs = Form().inputs()
        inputs[index] = inputs[index].astype(dtype)
        with pytest.raises(PluginError, match=f"tensor {index} not supported"):
            driver.run(Form().attributes, inputs)


def test_no_plugin_has_the_name_of_an_onnx_operator():
    """TensorRT ignores the domain."""
    operators = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    assert OP_EXIT not in operators
