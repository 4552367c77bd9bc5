"""Attention with a bias on ONNX Runtime: several new tokens after a past, K/V written into pages, equal to numpy."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tide_export.graph.rewriting import FLOAT, INT32, INT64, typed_value
from tide_export.lower.onnxruntime.attention import PagedAttentionPass
from tide_export.lower.onnxruntime.paged_attention import PagedAttentionFunctionsPass
from tide_export.names.operators import DOMAIN, OP_ATTENTION

HEADS, WIDTH, PAGE, TOTAL, SCALE = 4, 16, 8, 30, 0.3
RNG = np.random.default_rng(0)


def session(kv_heads: int, window: int | None) -> ort.InferenceSession:
    """TideAttention as `compose` gives it, lowered."""
    inputs = [typed_value("query", FLOAT, [1, HEADS, "s", WIDTH])]
    inputs += [typed_value(name, FLOAT, [1, kv_heads, "s", WIDTH]) for name in ("key", "value")]
    inputs += [typed_value(name, FLOAT, ["p", kv_heads, PAGE, WIDTH]) for name in ("key_pages", "value_pages")]
    inputs += [typed_value("table", INT32, [1, "t"]), typed_value("lengths", INT64, [1])]
    bias = typed_value("bias", FLOAT, [HEADS, TOTAL])
    attributes = {"num_heads": HEADS, "kv_num_heads": kv_heads, "head_dim": WIDTH, "scale": SCALE, "layer": 0}
    if window is not None:
        attributes["window"] = window
    node = ir.node(
        OP_ATTENTION, [*inputs, None, None, bias], attributes=attributes, domain=DOMAIN, num_outputs=3, name="attention"
    )
    shapes = ([1, "s", HEADS, WIDTH], *[["p", kv_heads, PAGE, WIDTH]] * 2)
    for output, name, shape in zip(node.outputs, ("attended", "new_key_pages", "new_value_pages"), shapes, strict=True):
        output.name, output.type, output.shape = name, ir.TensorType(FLOAT), ir.Shape(shape)
    read = ir.node("Identity", [node.outputs[0]], name="read")
    context = read.outputs[0]
    context.name, context.type, context.shape = "context", ir.TensorType(FLOAT), ir.Shape(shapes[0])
    outputs = [context, *node.outputs[1:]]
    graph = ir.Graph([*inputs, bias], outputs, nodes=[node, read], opset_imports={"": 23, DOMAIN: 1}, name="step")
    model = ir.Model(graph, ir_version=10)
    PagedAttentionPass("float32")(model)
    PagedAttentionFunctionsPass()(model)
    assert [function.overload for function in model.functions.values()] == [""]
    return ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString())


@pytest.mark.parametrize("chunks", [[TOTAL], [1] * TOTAL, [7, 1, 9, 3, 10]], ids=["prompt", "one by one", "pending"])
@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (1, None), (2, 5)])
def test_scores_get_the_bias_of_their_head_and_key(chunks: list[int], kv_heads: int, window: int | None) -> None:
    query = RNG.normal(size=(HEADS, TOTAL, WIDTH)).astype(np.float32)
    key, values = (RNG.normal(size=(kv_heads, TOTAL, WIDTH)).astype(np.float32) for _ in range(2))
    bias = 2 * RNG.normal(size=(HEADS, TOTAL)).astype(np.float32)
    step = session(kv_heads, window)
    pages = [np.zeros((6, kv_heads, PAGE, WIDTH), np.float32) for _ in range(2)]
    table = np.array([[4, 1, 5, 0]], np.int32)
    results, start = [], 0
    for count in chunks:
        stop = start + count
        feeds = {
            "query": query[None, :, start:stop],
            "key": key[None, :, start:stop],
            "value": values[None, :, start:stop],
            "key_pages": pages[0],
            "value_pages": pages[1],
            "table": table,
            "lengths": np.array([stop]),
            "bias": bias,
        }
        result, *pages = step.run(None, feeds)
        results.append(result[0])
        start = stop
    stored = pages[0][table[0]].transpose(1, 0, 2, 3).reshape(kv_heads, -1, WIDTH)
    np.testing.assert_array_equal(stored[:, :TOTAL], key)
    repeats = HEADS // kv_heads
    logits = SCALE * query @ np.repeat(key, repeats, axis=0).transpose(0, 2, 1) + bias[:, None]
    at, to = np.ogrid[:TOTAL, :TOTAL]
    logits[:, ~((to <= at) & (to > at - (window or TOTAL)))] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = (weights @ np.repeat(values, repeats, axis=0)).transpose(1, 0, 2)
    np.testing.assert_allclose(np.concatenate(results), expected, atol=1e-5)
