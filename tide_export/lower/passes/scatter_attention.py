"""`tide::TideAttention` becomes standard operators on K/V buffers of a fixed length: TensorScatter, then Attention.

For networks of one segment (`lower.tensorrt`). New keys and values are scattered into the buffers at each row's own
length, which TensorRT does in place; an explicit boolean mask [B, 1, S, C] says which of the C places each token sees,
so that rows of a batch may be of any length and any number of tokens be new. Sliding windows are in the mask, one mask
per width. Attention with a softcap, which TensorRT's Attention does not have, is written out as two products around a
softmax in float32.

Precondition: TideAttention has eight inputs (query, key, value, past key, past value, past lengths [B], positions
[B, S], places of the buffers [1, 1, 1, C]) and three outputs. Postcondition: none is left.
"""

import itertools

import numpy as np
import onnx_ir as ir

from tide_export.lower.passes._common import add_before, constant, drop_unused, nodes_of
from tide_export.names import DOMAIN, OP_ATTENTION

SWAP_HEADS = [0, 2, 1, 3]
FLOAT, BOOL, INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64


class ScatterAttentionPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model, OP_ATTENTION, DOMAIN)
        masks: dict[int, ir.Value] = {}
        for node in nodes:
            window = node.attributes.get_int("window", 0)
            if window not in masks:
                masks[window] = _mask(model, node, window)
            _lower(model, node, masks[window])
        return ir.passes.PassResult(model, modified=bool(nodes))


def _mask(model: ir.Model, first: ir.Node, window: int) -> ir.Value:
    """bool [B, 1, S, C], in front of the first attention that reads it: true where place j holds a token that the one
    at position p sees, p - window < j <= p (no lower bound without a window)."""
    positions, places = first.inputs[6], first.inputs[7]
    assert positions is not None
    assert positions.shape is not None
    assert places is not None
    assert places.shape is not None
    batch, tokens, capacity = positions.shape[0], positions.shape[1], places.shape[-1]
    suffix = f"_mask_{window}"
    axes = constant(model, "axes_1_3", np.array([1, 3], dtype=np.int64))
    rows = [(INT64, [batch, 1, tokens, 1])]
    shape = [(BOOL, [batch, 1, tokens, capacity])]
    own = add_before(first, "Unsqueeze", [positions, axes], outputs=rows, suffix=suffix).outputs[0]
    seen = add_before(first, "LessOrEqual", [places, own], outputs=shape, suffix=suffix).outputs[0]
    if not window:
        return seen
    width = constant(model, f"window_{window}", np.array(window, dtype=np.int64))
    edge = add_before(first, "Sub", [own, width], outputs=rows, suffix=suffix).outputs[0]
    near = add_before(first, "Greater", [places, edge], outputs=shape, suffix=suffix).outputs[0]
    return add_before(first, "And", [seen, near], outputs=shape, suffix=suffix).outputs[0]


def _lower(model: ir.Model, node: ir.Node, mask: ir.Value) -> None:
    query, key, value, past_key, past_value, lengths, _, _ = node.inputs
    assert past_key is not None
    assert past_value is not None
    buffers = []
    for new, past, output, suffix in (
        (key, past_key, node.outputs[1], "_k"),
        (value, past_value, node.outputs[2], "_v"),
    ):
        inputs = [past, new, lengths]
        kinds = [(past.dtype, past.shape)]
        present = add_before(node, "TensorScatter", inputs, {"axis": -2}, outputs=kinds, suffix=suffix).outputs[0]
        output.replace_all_uses_with(present, replace_graph_outputs=True)
        present.name = output.name
        buffers.append(present)
    keys, values = buffers
    if "softcap" in node.attributes:
        mixed = _written_out(model, node, query, keys, values, mask)
    else:
        mixed = _attention(node, query, keys, values, mask)
    kinds = [(node.outputs[0].dtype, node.outputs[0].shape)]
    turned = add_before(node, "Transpose", [mixed], {"perm": SWAP_HEADS}, outputs=kinds, suffix="_out").outputs[0]
    node.outputs[0].replace_all_uses_with(turned, replace_graph_outputs=True)
    drop_unused([node])


def _attention(node: ir.Node, query: ir.Value | None, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
    """[B, H, S, head_dim] by the one operator."""
    assert query is not None
    attributes = {"scale": node.attributes["scale"].as_float()}
    kinds = [(query.dtype, query.shape)]
    return add_before(node, "Attention", [query, keys, values, mask], attributes, outputs=kinds).outputs[0]


def _written_out(
    model: ir.Model, node: ir.Node, query: ir.Value | None, keys: ir.Value, values: ir.Value, mask: ir.Value
) -> ir.Value:
    """The same with softcap * tanh(score / softcap), head groups of one K/V head side by side."""
    assert query is not None
    heads, kv_heads, width = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads", "head_dim"))
    scale, cap = node.attributes["scale"].as_float(), node.attributes["softcap"].as_float()
    dtype = query.dtype or FLOAT

    numbers = itertools.count()

    def op(name: str, inputs: list[ir.Value], attributes: dict | None = None, *, to: ir.DataType = FLOAT) -> ir.Value:
        suffix = f"_{next(numbers)}"
        return add_before(node, name, inputs, attributes, outputs=[(to, None)], suffix=suffix).outputs[0]

    def number_of(name: str, value: float) -> ir.Value:
        return constant(model, f"{name}_{value!r}", np.array(value, dtype=np.float32))

    split = constant(model, f"groups_{kv_heads}", np.array([0, kv_heads, heads // kv_heads, -1, width], dtype=np.int64))
    merge = constant(model, f"heads_{heads}", np.array([0, heads, -1, width], dtype=np.int64))
    axis = constant(model, "axis_2", np.array([2], dtype=np.int64))
    grouped = op("Reshape", [query, split], to=dtype)  # [B, Hkv, G, S, Dh]
    turned = op("Transpose", [op("Unsqueeze", [keys, axis], to=dtype)], {"perm": [0, 1, 2, 4, 3]}, to=dtype)
    scores = op("MatMul", [grouped, turned], to=dtype)
    if dtype != FLOAT:
        scores = op("Cast", [scores], {"to": FLOAT.value})
    capped = op("Tanh", [op("Mul", [scores, number_of("scale", scale / cap)])])
    scores = op("Mul", [capped, number_of("softcap", cap)])
    seen = op("Unsqueeze", [mask, axis], to=BOOL)  # [B, 1, 1, S, C]
    scores = op("Where", [seen, scores, number_of("unseen", float(np.finfo(np.float32).min))])
    weights = op("Softmax", [scores], {"axis": -1})
    if dtype != FLOAT:
        weights = op("Cast", [weights], {"to": dtype.value}, to=dtype)
    mixed = op("MatMul", [weights, op("Unsqueeze", [values, axis], to=dtype)], to=dtype)
    merged = op("Reshape", [mixed, merge], to=dtype)
    merged.shape = query.shape
    return merged
