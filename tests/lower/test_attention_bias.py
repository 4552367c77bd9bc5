"""Attention with a bias on ONNX Runtime: several new tokens after a past, K/V written in place, equal to numpy."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tide_export.lower.onnxruntime.group_query_attention import GroupQueryAttentionPass
from tide_export.names import DOMAIN, OP_ATTENTION

HEADS, WIDTH, CAPACITY, TOTAL, SCALE = 4, 16, 64, 30, 0.3
RNG = np.random.default_rng(0)


def value(name: str, shape: list, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def session(kv_heads: int, window: int | None) -> ort.InferenceSession:
    """TideAttention as `compose` gives it, lowered."""
    inputs = [value("query", [1, HEADS, "s", WIDTH])]
    inputs += [value(name, [1, kv_heads, "s", WIDTH]) for name in ("key", "value")]
    inputs += [value(name, [1, kv_heads, "c", WIDTH]) for name in ("past_key", "past_value")]
    inputs += [value("total", [], ir.DataType.INT32), value("bias", [1, HEADS, "s", "t"])]
    attributes = {"num_heads": HEADS, "kv_num_heads": kv_heads, "head_dim": WIDTH, "scale": SCALE, "layer": 0}
    if window is not None:
        attributes["window"] = window
    node = ir.node(
        OP_ATTENTION,
        [*inputs[:6], None, inputs[6]],
        attributes=attributes,
        domain=DOMAIN,
        num_outputs=3,
        name="attention",
    )
    shapes = ([1, "s", HEADS, WIDTH], *[[1, kv_heads, "c", WIDTH]] * 2)
    for output, name, shape in zip(node.outputs, ("attended", "present_key", "present_value"), shapes, strict=True):
        output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    read = ir.node("Identity", [node.outputs[0]], name="read")
    context = read.outputs[0]
    context.name, context.type, context.shape = "context", ir.TensorType(ir.DataType.FLOAT), ir.Shape(shapes[0])
    imports = {"": 23, "com.microsoft": 1, DOMAIN: 1}
    outputs = [context, *node.outputs[1:]]
    graph = ir.Graph(inputs, outputs, nodes=[node, read], opset_imports=imports, name="step")
    model = ir.Model(graph, ir_version=10)
    GroupQueryAttentionPass()(model)
    assert "GroupQueryAttention" in {node.op_type for node in model.graph}
    return ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())


@pytest.mark.parametrize("chunks", [[TOTAL], [1] * TOTAL, [7, 1, 9, 3, 10]], ids=["prompt", "one by one", "pending"])
@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (1, None), (2, 5)])
def test_scores_get_the_bias_of_their_head_and_key(chunks: list[int], kv_heads: int, window: int | None) -> None:
    query = RNG.normal(size=(HEADS, TOTAL, WIDTH)).astype(np.float32)
    key, values = (RNG.normal(size=(kv_heads, TOTAL, WIDTH)).astype(np.float32) for _ in range(2))
    bias = 2 * RNG.normal(size=(HEADS, TOTAL)).astype(np.float32)
    step = session(kv_heads, window)
    past = [ort.OrtValue.ortvalue_from_numpy(np.zeros((1, kv_heads, CAPACITY, WIDTH), np.float32)) for _ in range(2)]
    results, start = [], 0
    for count in chunks:
        stop = start + count
        feeds = {
            "query": query[None, :, start:stop],
            "key": key[None, :, start:stop],
            "value": values[None, :, start:stop],
            "total": np.array(stop, np.int32),
            "bias": np.broadcast_to(bias[None, :, None, :stop], (1, HEADS, count, stop)),
        }
        binding = step.io_binding()
        binding.bind_output("context")
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
        for kind, buffer in zip(("key", "value"), past, strict=True):
            binding.bind_ortvalue_input(f"past_{kind}", buffer)
            binding.bind_ortvalue_output(f"present_{kind}", buffer)
        step.run_with_iobinding(binding)
        results.append(binding.get_outputs()[0].numpy()[0])
        start = stop
    np.testing.assert_array_equal(past[0].numpy()[0, :, :TOTAL], key)
    repeats = HEADS // kv_heads
    logits = SCALE * query @ np.repeat(key, repeats, axis=0).transpose(0, 2, 1) + bias[:, None]
    at, to = np.ogrid[:TOTAL, :TOTAL]
    logits[:, ~((to <= at) & (to > at - (window or TOTAL)))] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = (weights @ np.repeat(values, repeats, axis=0)).transpose(1, 0, 2)
    np.testing.assert_allclose(np.concatenate(results), expected, atol=1e-5)
