"""Attention for TensorRT: buffers, masks, softcaps, sinks and biases against float64, row by row."""

from itertools import product

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass
from tide_export.lower.tensorrt.scatter_attention import ScatterAttentionPass
from tide_export.names.operators import DOMAIN, OP_ATTENTION

B, H, KV, S, D, C = 2, 4, 2, 3, 8, 12
SCALE, CAP, WINDOW = 0.3, 2.0, 4
LENGTHS, TABLE_LENGTH = [5, 0], 20
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def value(name: str, dtype: ir.DataType, *shape: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def weight(name: str, array: np.ndarray) -> ir.Value:
    return ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        shape=ir.Shape(array.shape),
        const_value=ir.tensor(array, name=name),
    )


def arrays(keys: int = C) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"query": (B, H, S, D), "key": (B, KV, S, D), "value": (B, KV, S, D)}
    shapes |= {"past_key": (B, KV, C, D), "past_value": (B, KV, C, D)}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["lengths"] = np.array(LENGTHS)
    feeds["positions"] = np.array([[length + i for i in range(S)] for length in LENGTHS])
    feeds["keys_read"] = np.arange(keys)
    return feeds


SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
# As steep and large as in a long context: lost in float32 unless relative to the new tokens.
BIAS = (np.array([[0.5], [0.1], [2.0], [1.0]]) * (np.arange(TABLE_LENGTH) + 1e5)).astype(np.float32)


def network(feeds: dict[str, np.ndarray], attributes: dict, sinks: bool, bias: bool) -> ir.Model:
    inputs = {name: value(name, FLOAT if a.dtype == np.float32 else INT64, *a.shape) for name, a in feeds.items()}
    extra = [weight("sinks", SINKS) if sinks else None, weight("bias", BIAS) if bias else None]
    sizes = {"layer": 0, "num_heads": H, "kv_num_heads": KV, "head_dim": D, "scale": SCALE}
    node = ir.node(
        OP_ATTENTION, [*inputs.values(), *extra], attributes=sizes | attributes, domain=DOMAIN, num_outputs=3
    )
    node.name = "attention"
    for output, name, shape in zip(
        node.outputs, ("mixed", "keys", "values"), ((B, S, H, D), (B, KV, C, D), (B, KV, C, D)), strict=True
    ):
        output.name, output.type, output.shape = name, ir.TensorType(FLOAT), ir.Shape(shape)
    result = ir.node("Identity", [node.outputs[0]])
    result.outputs[0].name, result.outputs[0].type = "out", ir.TensorType(FLOAT)
    result.outputs[0].shape = ir.Shape((B, S, H, D))
    graph = ir.Graph(
        list(inputs.values()),
        [result.outputs[0], *node.outputs[1:]],
        nodes=[node, result],
        initializers=[entry for entry in extra if entry is not None],
        opset_imports={"": 24, DOMAIN: 1},
        name="attention",
    )
    return ir.Model(graph, ir_version=11)


def reference(feeds: dict[str, np.ndarray], attributes: dict, sinks: bool, bias: bool) -> np.ndarray:
    """Every row, head and token by itself, in float64, over the tokens it sees."""
    out = np.zeros((B, S, H, D))
    for row, head, step in product(range(B), range(H), range(S)):
        length, at = LENGTHS[row], LENGTHS[row] + step
        keys, values = (
            np.concatenate(
                [feeds[f"past_{name}"][row, head // (H // KV), :length], feeds[name][row, head // (H // KV)]]
            )
            for name in ("key", "value")
        )
        first = max(0, at - attributes.get("window", at + 1) + 1)
        seen = slice(first, at + 1)
        scores = keys[seen].astype(np.float64) @ feeds["query"][row, head, step].astype(np.float64) * SCALE
        if "softcap" in attributes:
            scores = CAP * np.tanh(scores / CAP)
        if bias:
            scores += BIAS[head, seen].astype(np.float64)
        weights = np.exp(scores - scores.max())
        total = weights.sum() + (np.exp(float(SINKS[head]) - scores.max()) if sinks else 0)
        out[row, step, head] = weights @ values[seen].astype(np.float64) / total
    return out


# A softmax with a sink changes by what is added to all its scores: both at once are refused (see test_tensorrt.py).
ONE_ADDED = [case for case in product([False, True], repeat=4) if not (case[0] and case[1])]


@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("keys", [C, max(LENGTHS) + S])
@pytest.mark.parametrize(("sinks", "bias", "softcap", "window"), ONE_ADDED)
def test_attention_equals_float64(sinks: bool, bias: bool, softcap: bool, window: bool, keys: int, folds: bool) -> None:
    attributes = ({"softcap": CAP} if softcap else {}) | ({"window": WINDOW} if window else {})
    feeds = arrays(keys)
    feeds["past_key"][:, :, keys:] = np.nan  # not read
    model = network(feeds, attributes, sinks, bias)
    ScatterAttentionPass(folds)(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    out, keys, _ = session.run(None, feeds)
    np.testing.assert_allclose(out, reference(feeds, attributes, sinks, bias), atol=2e-6)
    for row, length in enumerate(LENGTHS):
        assert np.array_equal(keys[row, :, length : length + S], feeds["key"][row])
        assert np.array_equal(keys[row, :, :length], feeds["past_key"][row, :, :length])
    fused = any(node.op_type == "Attention" for node in model.graph)
    assert fused == (not (sinks or bias or softcap)), "spelled out only where TensorRT's operator cannot compute it"
    for node in model.graph:
        if node.op_type == "Attention":
            rows = node.inputs[0]
            assert rows is not None
            assert rows.shape is not None
            assert rows.shape[1] == (KV if folds else H)


def test_what_is_added_to_scores_stays_float32_in_half_precision() -> None:
    feeds = arrays()
    model = network(feeds, {}, sinks=True, bias=True)
    HalfPrecisionPass("fp16")(model)
    initializers = model.graph.initializers
    assert {initializers[name].dtype for name in ("sinks", "bias")} == {FLOAT}
    ScatterAttentionPass(folds_queries=True)(model)
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    assert softmax.inputs[0].dtype == FLOAT
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT16
    halves = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in feeds.items()}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    assert session.run(None, halves)[0].dtype == np.float16
