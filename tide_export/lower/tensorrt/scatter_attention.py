"""`tide::TideAttention` becomes standard operators on K/V buffers of a fixed length: TensorScatter, then Attention.

For networks of one segment (`lower.tensorrt.lower`). New keys and values are scattered into the buffers at each row's
own length, which TensorRT does in place; an explicit boolean mask [B, 1, S, C] says which of the C places each token
sees, so that rows of a batch may be of any length and any number of tokens be new. Sliding windows are in the mask, one
mask per width. What TensorRT's Attention does not have is written out as two products around a softmax in float32:
softcaps, sinks (a column of its own in the softmax, which weighs nothing) and biases by key position (ALiBi).

Precondition: TideAttention has ten inputs (query, key, value, past key, past value, past lengths [B], positions [B, S],
places of the buffers [1, 1, 1, C], and, or nothing, sinks [H] and the bias of every head at every place, [H, N], both
float32) and three outputs. Postcondition: none is left.
"""

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from tide_export.lower.rewriting import add_before, constant, derived_weight, drop_unused, nodes_of
from tide_export.names import DOMAIN, OP_ATTENTION

SWAP_HEADS = [0, 2, 1, 3]
LENGTHS, POSITIONS, PLACES, SINKS, BIAS = range(5, 10)  # inputs
FLOAT, BOOL, INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64


class ScatterAttentionPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model, OP_ATTENTION, DOMAIN)
        masks: dict[int, ir.Value] = {}
        biases: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            window, table = node.attributes.get_int("window", 0), node.inputs[BIAS]
            if window not in masks:
                masks[window] = _mask(model, node, window)
            if table is not None and table not in biases:
                biases[table] = _bias(model, node, table)
            _lower(model, node, masks[window], None if table is None else biases[table])
        return ir.passes.PassResult(model, modified=bool(nodes))


def _mask(model: ir.Model, first: ir.Node, window: int) -> ir.Value:
    """bool [B, 1, S, C], in front of the first attention that reads it: true where place j holds a token that the one
    at position p sees, p - window < j <= p (no lower bound without a window)."""
    positions, places = first.inputs[POSITIONS], first.inputs[PLACES]
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


def _bias(model: ir.Model, first: ir.Node, table: ir.Value) -> ir.Value:
    """float32 [B, H, 1, C], in front of the first attention that reads it: the bias of every place relative to that of
    the row's first new token. A row's softmax does not change by it, and numbers that stay small near the query lose
    nothing to rounding."""
    lengths, places, tensor = first.inputs[LENGTHS], first.inputs[PLACES], table.const_value
    assert lengths is not None
    assert lengths.shape is not None
    assert places is not None
    assert places.shape is not None
    assert table.shape is not None
    assert tensor is not None
    heads, capacity, batch = int(table.shape[0]), int(places.shape[-1]), lengths.shape[0]  # type: ignore[arg-type]
    by_place = derived_weight(
        model,
        f"{table.name}.places",
        [capacity, heads],
        FLOAT,
        lambda: np.ascontiguousarray(tensor.numpy()[:, :capacity].T, dtype=np.float32),
    )
    numbers = itertools.count()

    def op(name: str, inputs: list[ir.Value], attributes: dict[str, Any], *shape: Any) -> ir.Value:
        suffix = f"_{table.name}_{next(numbers)}"
        return add_before(first, name, inputs, attributes, outputs=[(FLOAT, shape)], suffix=suffix).outputs[0]

    axis = constant(model, "axis_1", np.array([1], dtype=np.int64))
    own = op("Gather", [by_place, lengths], {"axis": 0}, batch, heads)
    relative = op("Sub", [by_place, op("Unsqueeze", [own, axis], {}, batch, 1, heads)], {}, batch, capacity, heads)
    turned = op("Transpose", [relative], {"perm": [0, 2, 1]}, batch, heads, capacity)
    axis = constant(model, "axis_2", np.array([2], dtype=np.int64))
    return op("Unsqueeze", [turned, axis], {}, batch, heads, 1, capacity)


def _lower(model: ir.Model, node: ir.Node, mask: ir.Value, bias: ir.Value | None) -> None:
    query, key, value, past_key, past_value, lengths = node.inputs[: LENGTHS + 1]
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
    assert query is not None
    if "softcap" in node.attributes or bias is not None or node.inputs[SINKS] is not None:
        mixed = _WrittenOut(model, node).mixed(query, keys, values, mask, bias)
    else:
        mixed = _attention(node, query, keys, values, mask)
    kinds = [(node.outputs[0].dtype, node.outputs[0].shape)]
    turned = add_before(node, "Transpose", [mixed], {"perm": SWAP_HEADS}, outputs=kinds, suffix="_out").outputs[0]
    node.outputs[0].replace_all_uses_with(turned, replace_graph_outputs=True)
    drop_unused([node])


def _attention(node: ir.Node, query: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value) -> ir.Value:
    """[B, H, S, head_dim] by the one operator."""
    attributes = {"scale": node.attributes["scale"].as_float()}
    kinds = [(query.dtype, query.shape)]
    return add_before(node, "Attention", [query, keys, values, mask], attributes, outputs=kinds).outputs[0]


class _WrittenOut:
    """One attention in single operators, the G heads of each of the Hkv K/V heads side by side."""

    def __init__(self, model: ir.Model, node: ir.Node):
        self.model, self.node = model, node
        names = ("num_heads", "kv_num_heads", "head_dim")
        self.heads, self.kv_heads, self.width = (node.attributes[name].as_int() for name in names)
        self.groups = self.heads // self.kv_heads
        self.counter = itertools.count()

    def mixed(
        self, query: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, bias: ir.Value | None
    ) -> ir.Value:
        """[B, H, S, head_dim] of query [B, H, S, head_dim] and buffers [B, Hkv, C, head_dim]."""
        dtype, op = query.dtype or FLOAT, self._op
        axis = self._numbers("axis_2", [2])
        grouped = op("Reshape", [query, self._by_group()], to=dtype)  # [B, Hkv, G, S, Dh]
        turned = op("Transpose", [op("Unsqueeze", [keys, axis], to=dtype)], {"perm": [0, 1, 2, 4, 3]}, to=dtype)
        scores = self._wide(op("MatMul", [grouped, turned], to=dtype))
        scores = self._scaled(scores)
        if bias is not None:
            scores = op("Add", [scores, op("Reshape", [bias, self._by_group(1)])])
        seen = op("Unsqueeze", [mask, axis], to=BOOL)  # [B, 1, 1, S, C]
        scores = op("Where", [seen, scores, self._number("unseen", float(np.finfo(np.float32).min))])
        sinks = self.node.inputs[SINKS]
        weights = op("Softmax", [scores], {"axis": -1}) if sinks is None else self._with_sinks(scores, sinks)
        if dtype != FLOAT:
            weights = op("Cast", [weights], {"to": dtype.value}, to=dtype)
        result = op("MatMul", [weights, op("Unsqueeze", [values, axis], to=dtype)], to=dtype)
        merged = op(
            "Reshape", [result, self._numbers(f"heads_{self.heads}", [0, self.heads, -1, self.width])], to=dtype
        )
        merged.shape = query.shape
        return merged

    def _scaled(self, scores: ir.Value) -> ir.Value:
        """The scores times the scale, through softcap * tanh(score / softcap) where there is one."""
        scale = self.node.attributes["scale"].as_float()
        if "softcap" not in self.node.attributes:
            return self._op("Mul", [scores, self._number("scale", scale)])
        cap = self.node.attributes["softcap"].as_float()
        capped = self._op("Tanh", [self._op("Mul", [scores, self._number("scale", scale / cap)])])
        return self._op("Mul", [capped, self._number("softcap", cap)])

    def _with_sinks(self, scores: ir.Value, sinks: ir.Value) -> ir.Value:
        """The softmax of scores [B, Hkv, G, S, C] and one more column, each head's sink, without that column."""
        op = self._op
        shape = self._numbers(f"sinks_{self.kv_heads}_{self.groups}", [1, self.kv_heads, self.groups, 1, 1])
        rows = op("Shape", [scores], {"start": 0, "end": 4}, to=INT64)
        one = self._numbers("axis_1", [1])
        column = op("Expand", [op("Reshape", [sinks, shape]), op("Concat", [rows, one], {"axis": 0}, to=INT64)])
        weights = op("Softmax", [op("Concat", [scores, column], {"axis": -1})], {"axis": -1})
        first, end, last = self._numbers("zeros", [0]), self._numbers("minus_one", [-1]), self._numbers("axis_4", [4])
        return op("Slice", [weights, first, end, last])

    def _by_group(self, tokens: int = -1) -> ir.Value:
        """The shape [B, Hkv, G, S, ..] of what has heads [B, H, S, ..]."""
        if tokens == 1:
            return self._numbers(f"bias_{self.kv_heads}_{self.groups}", [0, self.kv_heads, self.groups, 1, -1])
        name = f"groups_{self.kv_heads}_{self.groups}_{self.width}"
        return self._numbers(name, [0, self.kv_heads, self.groups, -1, self.width])

    def _wide(self, scores: ir.Value) -> ir.Value:
        return scores if scores.dtype == FLOAT else self._op("Cast", [scores], {"to": FLOAT.value})

    def _op(
        self, name: str, inputs: list[ir.Value], attributes: dict | None = None, *, to: ir.DataType = FLOAT
    ) -> ir.Value:
        suffix = f"_{next(self.counter)}"
        return add_before(self.node, name, inputs, attributes, outputs=[(to, None)], suffix=suffix).outputs[0]

    def _number(self, name: str, value: float) -> ir.Value:
        return constant(self.model, f"{name}_{value!r}", np.array(value, dtype=np.float32))

    def _numbers(self, name: str, values: list[int]) -> ir.Value:
        return constant(self.model, name, np.array(values, dtype=np.int64))
