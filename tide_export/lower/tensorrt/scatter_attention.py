"""Replaces `tide::TideAttention` by standard operators on K/V buffers of a fixed length.

They are TensorScatter and Attention.

New keys and values are scattered into the buffers at each row's length, which TensorRT does in place. Attention reads
the first J of the C positions, as many as the input `key_indices` has, so that its cost follows the sequences' length
and not the buffers'. An explicit boolean mask [B, 1, S, J] holds which of them each token sees, so that rows of a batch
may have any lengths and any number of new tokens. Sliding windows are in the mask, one mask per width. For TensorRT for
RTX the query heads that read one K/V head are folded: rows of one query, G x S of them.

What TensorRT's Attention lacks is spelled out as two matmuls around a softmax in float32: softcaps, sinks (one more
column in the softmax, which weighs no value) and biases by key position (ALiBi). Attention to an earlier layer's keys
and values scatters none: it reads that layer's buffers, written in the same network or an input of it.
"""

import itertools

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    BOOL,
    FLOAT,
    INT64,
    SWAP_HEADS,
    Dim,
    constant,
    derived_weight,
    dims,
    drop_unused,
    ensure_none_left,
    integers,
    nodes_of,
    op_before,
    replace_value,
    require_arity,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_ATTENTION

PAST_KEY, _, LENGTHS, POSITIONS, KEYS, SINKS, BIAS = range(3, 10)  # inputs


class ScatterAttentionPass(ir.passes.InPlacePass):
    """Replaces the nodes that `compose.segments` gives.

    They have ten inputs and three outputs, or one output without key and value.

    Args:
        folds_queries: whether query heads are folded (`runtime.tensorrt.flavours.Flavour`).
    """

    def __init__(self, folds_queries: bool):
        super().__init__()
        self.folds_queries = folds_queries

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_ATTENTION, inputs=[10], outputs=[1, 3])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = nodes_of(graph, OP_ATTENTION, DOMAIN)
        masks: dict[tuple[int, int], ir.Value] = {}
        biases: dict[ir.Value, ir.Value] = {}
        if nodes:
            reach = _Reach(graph, nodes[0])
        for node in nodes:
            window, table = node.attributes.get_int("window", 0), node.inputs[BIAS]
            spelled_out = _is_spelled_out(node)
            groups = _groups(node) if self.folds_queries and not spelled_out else 1
            key = window, groups
            if key not in masks:
                masks[key] = _mask(graph, node, reach.places, *key)
            if table is not None and table not in biases:
                biases[table] = _bias(graph, node, table, reach.indices)
            if spelled_out:
                bias = None if table is None else biases[table]
                attended = _SpelledOut(graph, node).attended(reach.operands(node), masks[key], bias)
            else:
                attended = _fused(graph, node, reach.operands(node), masks[key], groups)
            _finish(node, attended)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_ATTENTION, DOMAIN))


def _mask(graph: ir.Graph, first: ir.Node, places: ir.Value, window: int, groups: int) -> ir.Value:
    """Adds the mask, bool [B, 1, G*S, J], before the first attention that reads it.

    It is true where the token at position p sees position j of the buffer, p - window < j <= p (no lower bound without
    a window). The S rows come G times, for `_fused`.
    """
    positions = first.inputs[POSITIONS]
    batch, rows = dims(positions)
    if groups > 1:
        # The positions and not the mask: TensorRT for RTX 1.7 fails where several layers read a repeated mask.
        repeats, shape = integers(graph, f"repeats_{groups}", [1, groups]), [batch, None]
        positions = op_before(first, "Tile", [positions, repeats], dtype=INT64, shape=shape, suffix=f"_g{groups}")
        rows = dims(positions)[1]
    column, cells, suffix = [batch, 1, rows, 1], [batch, 1, rows, dims(places)[-1]], f"_mask_{window}_{groups}"
    axes = integers(graph, "axes_1_3", [1, 3])
    query = op_before(first, "Unsqueeze", [positions, axes], dtype=INT64, shape=column, suffix=suffix)
    causal = op_before(first, "LessOrEqual", [places, query], dtype=BOOL, shape=cells, suffix=suffix)
    if not window:
        return causal
    width = integers(graph, f"window_{window}", window)
    edge = op_before(first, "Sub", [query, width], dtype=INT64, shape=column, suffix=suffix)
    near = op_before(first, "Greater", [places, edge], dtype=BOOL, shape=cells, suffix=suffix)
    return op_before(first, "And", [causal, near], dtype=BOOL, shape=cells, suffix=suffix)


def _bias(graph: ir.Graph, first: ir.Node, table: ir.Value, indices: ir.Value) -> ir.Value:
    """Adds the bias, float32 [B, H, 1, J], before the first attention that reads it.

    It is relative to that of the row's first new token. This does not change a row's softmax, and numbers that are
    small near the query lose nothing to rounding.
    """
    lengths, tensor = required(first.inputs[LENGTHS]), required(table.const_value)
    heads, capacity, batch = static_dim(table, 0), static_dim(first.inputs[PAST_KEY], 2), dims(lengths)[0]
    keys = dims(indices)[0]
    by_position = derived_weight(
        graph,
        f"{table.name}.places",
        [capacity, heads],
        FLOAT,
        lambda: np.ascontiguousarray(tensor.numpy()[:, :capacity].T, dtype=np.float32),
    )
    numbers = itertools.count()

    def op(op_type: str, inputs: list[ir.Value], attributes: dict | None, *shape: Dim) -> ir.Value:
        suffix = f"_{table.name}_{next(numbers)}"
        return op_before(first, op_type, inputs, attributes, dtype=FLOAT, shape=shape, suffix=suffix)

    at_length = op("Gather", [by_position, lengths], {"axis": 0}, batch, heads)
    at_length = op("Unsqueeze", [at_length, integers(graph, "axis_1", [1])], None, batch, 1, heads)
    at_keys = op("Gather", [by_position, indices], {"axis": 0}, keys, heads)
    relative = op("Sub", [at_keys, at_length], None, batch, keys, heads)
    transposed = op("Transpose", [relative], {"perm": [0, 2, 1]}, batch, heads, keys)
    return op("Unsqueeze", [transposed, integers(graph, "axis_2", [2])], None, batch, heads, 1, keys)


def _is_spelled_out(node: ir.Node) -> bool:
    """Whether TensorRT's Attention lacks what this one has."""
    return "softcap" in node.attributes or node.inputs[SINKS] is not None or node.inputs[BIAS] is not None


def _groups(node: ir.Node) -> int:
    """Query heads that read one K/V head."""
    return node.attributes["num_heads"].as_int() // node.attributes["kv_num_heads"].as_int()


def _fused(graph: ir.Graph, node: ir.Node, operands: tuple[ir.Value, ...], mask: ir.Value, groups: int) -> ir.Value:
    """Adds TensorRT's Attention: returns [B, H, S, head_dim].

    `groups` query heads of a K/V head are groups*S rows of one head.
    """
    query, keys, values = operands
    batch, width = dims(query)[0], node.attributes["head_dim"].as_int()
    heads, dtype = node.attributes["num_heads"].as_int(), query.dtype
    kv_heads = heads // groups
    rows, folded = query, [batch, kv_heads, None, width]
    if groups > 1:
        shape = integers(graph, f"fold_{kv_heads}_{width}", [0, kv_heads, -1, width])
        rows = op_before(node, "Reshape", [query, shape], dtype=dtype, shape=folded, suffix="_fold")
    attributes = {"scale": node.attributes["scale"].as_float()}
    attended = op_before(node, "Attention", [rows, keys, values, mask], attributes, dtype=dtype, shape=folded)
    if groups == 1:
        return attended
    shape = integers(graph, f"unfold_{heads}_{width}", [0, heads, -1, width])
    return op_before(node, "Reshape", [attended, shape], dtype=dtype, shape=query.shape, suffix="_unfold")


def _finish(node: ir.Node, attended: ir.Value) -> None:
    """Replaces the node by `attended`, token by token as its readers take it."""
    old = node.outputs[0]
    by_token = op_before(
        node, "Transpose", [attended], {"perm": SWAP_HEADS}, dtype=old.dtype, shape=old.shape, suffix="_out"
    )
    old.replace_all_uses_with(by_token, replace_graph_outputs=True)
    drop_unused([node])


class _Reach:
    """The part of the buffers that a network attends to: positions `indices` [J], `places` [1, 1, 1, J]."""

    def __init__(self, graph: ir.Graph, first: ir.Node):
        self.indices = required(first.inputs[KEYS])
        self.keys = dims(self.indices)[0]
        axes = integers(graph, "axes_0_1_2", [0, 1, 2])
        self.places = op_before(first, "Unsqueeze", [self.indices, axes], dtype=INT64, shape=[1, 1, 1, self.keys])
        self._start, self._axis = integers(graph, "position_0", [0]), integers(graph, "axis_2", [2])
        self._end = op_before(first, "Shape", [self.indices], dtype=INT64, shape=[1], suffix="_keys")

    def operands(self, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Returns the query, and keys and values [B, Hkv, J, head_dim], the new ones among them if it has any."""
        buffers = list(map(required, node.inputs[PAST_KEY:LENGTHS]))
        if len(node.outputs) > 1:
            buffers = _with_new(node)
        keys, values = (
            op_before(
                node,
                "Slice",
                [buffer, self._start, self._end, self._axis],
                dtype=buffer.dtype,
                shape=[*dims(buffer)[:2], self.keys, dims(buffer)[3]],
                suffix=suffix,
            )
            for buffer, suffix in zip(buffers, ("_keys", "_values"), strict=True)
        )
        return required(node.inputs[0]), keys, values


def _with_new(node: ir.Node) -> list[ir.Value]:
    """The K/V buffers with the new keys and values in them."""
    _, key, value, past_key, past_value, lengths = map(required, node.inputs[: LENGTHS + 1])
    buffers = []
    for new, past, output, suffix in zip(
        (key, value), (past_key, past_value), node.outputs[1:], ("_k", "_v"), strict=True
    ):
        inputs = [past, new, lengths]
        buffer = op_before(
            node, "TensorScatter", inputs, {"axis": -2}, dtype=past.dtype, shape=past.shape, suffix=suffix
        )
        replace_value(output, buffer)
        buffers.append(buffer)
    return buffers


class _SpelledOut:
    """Adds one attention in single operators.

    The G query heads of each of the Hkv K/V heads are one dimension.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node):
        self.graph, self.node = graph, node
        names = ("num_heads", "kv_num_heads", "head_dim")
        self.heads, self.kv_heads, self.width = (node.attributes[name].as_int() for name in names)
        self.groups = self.heads // self.kv_heads
        self.counter = itertools.count()

    def attended(self, operands: tuple[ir.Value, ...], mask: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Attends with query [B, H, S, head_dim] to keys and values [B, Hkv, J, head_dim].

        Returns [B, H, S, head_dim].
        """
        query, keys, values = operands
        dtype, op = query.dtype or FLOAT, self._op
        axis = integers(self.graph, "axis_2", [2])
        grouped = op("Reshape", [query, self._by_group()], to=dtype)  # [B, Hkv, G, S, Dh]
        transposed = op("Transpose", [op("Unsqueeze", [keys, axis], to=dtype)], {"perm": [0, 1, 2, 4, 3]}, to=dtype)
        scores = op("MatMul", [grouped, transposed], to=dtype)
        scores = self._scaled(scores if dtype == FLOAT else op("Cast", [scores], {"to": FLOAT.value}))
        if bias is not None:
            shape = integers(self.graph, f"bias_{self.kv_heads}_{self.groups}", [0, self.kv_heads, self.groups, 1, -1])
            scores = op("Add", [scores, op("Reshape", [bias, shape])])
        seen = op("Unsqueeze", [mask, axis], to=BOOL)  # [B, 1, 1, S, J]
        scores = op("Where", [seen, scores, self._number("unseen", float(np.finfo(np.float32).min))])
        sinks = self.node.inputs[SINKS]
        weights = op("Softmax", [scores], {"axis": -1}) if sinks is None else self._with_sinks(scores, sinks)
        if dtype != FLOAT:
            weights = op("Cast", [weights], {"to": dtype.value}, to=dtype)
        result = op("MatMul", [weights, op("Unsqueeze", [values, axis], to=dtype)], to=dtype)
        shape = integers(self.graph, f"heads_{self.heads}", [0, self.heads, -1, self.width])
        merged = op("Reshape", [result, shape], to=dtype)
        merged.shape = query.shape
        return merged

    def _scaled(self, scores: ir.Value) -> ir.Value:
        """The scores times the scale, through softcap * tanh(score / softcap) if there is a softcap."""
        scale = self.node.attributes["scale"].as_float()
        if "softcap" not in self.node.attributes:
            return self._op("Mul", [scores, self._number("scale", scale)])
        cap = self.node.attributes["softcap"].as_float()
        capped = self._op("Tanh", [self._op("Mul", [scores, self._number("scale", scale / cap)])])
        return self._op("Mul", [capped, self._number("softcap", cap)])

    def _with_sinks(self, scores: ir.Value, sinks: ir.Value) -> ir.Value:
        """The softmax of scores [B, Hkv, G, S, J] and one more column, each head's sink, without that column."""
        op, graph = self._op, self.graph
        shape = integers(graph, f"sinks_{self.kv_heads}_{self.groups}", [1, self.kv_heads, self.groups, 1, 1])
        rows = op("Shape", [scores], {"start": 0, "end": 4}, to=INT64)
        by_group, one = op("Reshape", [sinks, shape]), integers(graph, "axis_1", [1])
        column = op("Expand", [by_group, op("Concat", [rows, one], {"axis": 0}, to=INT64)])
        weights = op("Softmax", [op("Concat", [scores, column], {"axis": -1})], {"axis": -1})
        first, end = integers(graph, "zeros", [0]), integers(graph, "minus_one", [-1])
        return op("Slice", [weights, first, end, integers(graph, "axis_4", [4])])

    def _by_group(self) -> ir.Value:
        """The shape [B, Hkv, G, S, head_dim] of a query [B, H, S, head_dim]."""
        name = f"groups_{self.kv_heads}_{self.groups}_{self.width}"
        return integers(self.graph, name, [0, self.kv_heads, self.groups, -1, self.width])

    def _op(
        self, op_type: str, inputs: list[ir.Value], attributes: dict | None = None, *, to: ir.DataType = FLOAT
    ) -> ir.Value:
        return op_before(self.node, op_type, inputs, attributes, dtype=to, suffix=f"_{next(self.counter)}")

    def _number(self, name: str, value: float) -> ir.Value:
        return constant(self.graph, f"{name}_{value!r}", np.array(value, dtype=np.float32))
