"""Adds numbers of tokens to attention scores by one more channel of queries and keys.

Some models (Doge) add to the scores of a key a number that is computed from the key's token. The product of query and
key grows by it where the key's further channel is that number and the query's is 1 over the scale, and the K/V cache
keeps it with the key.
"""

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    constant,
    dims,
    graph_of,
    integers,
    op_before,
    ops_before,
    rank,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN
from tide_export.trace.attention.interface import HEAD_DIM_STEP


def from_tokens(graph: ir.Graph, value: ir.Value | None) -> bool:
    """Whether `value` depends on the tokens, not on their number and positions alone."""
    token_ids = graph.inputs[0]
    reached, todo = set(), [value]
    while todo:
        item = todo.pop()
        node = item.producer() if item is not None else None
        if item is token_ids or (node is not None and node.domain == DOMAIN):
            return True
        if node is None or node in reached or known_shape(graph, node, 1) is not None:
            continue
        reached.add(node)
        todo += node.inputs
    return False


def known_shape(graph: ir.Graph, node: ir.Node, length: int) -> list[int] | None:
    """Returns what a `Shape` gives for one sequence of `length` tokens; None if it depends on more."""
    if node.op_type != "Shape" or required(node.inputs[0]).shape is None:
        return None
    shape = dims(required(node.inputs[0]))[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    sizes = dict(zip(dims(graph.inputs[0]), (1, length), strict=True))
    if any(not isinstance(dim, int) and dim not in sizes for dim in shape):
        return None
    return [dim if isinstance(dim, int) else sizes[dim] for dim in shape]


def numbers_of_keys(graph: ir.Graph, value: ir.Value) -> ir.Value | None:
    """The value [B, G, 1, S] that `value` [B, H, S, S] is made of, masks apart; None if there is none."""
    if rank(value) != 4:
        return None
    keys, source = dims(value)[3], value
    while rank(source) != 4 or dims(source)[2:] != [1, keys] or source.dtype != ir.DataType.FLOAT:
        node = source.producer()
        before = [item for item in node.inputs if from_tokens(graph, item)] if node is not None else []
        if len(before) != 1:
            return None
        source = required(before[0])
    return source if isinstance(dims(source)[1], int) else None


def with_key_bias(
    node: ir.Node, query: ir.Value, key: ir.Value, value: ir.Value, bias: ir.Value, factor: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns `query`, `key`, `value` [B, .., S, Dh] with further channels, computed before `node`.

    Args:
        bias: what is added to the product of query and key, by K/V head and key, [B, H_kv, 1, S].
        factor: of `bias`.
    """
    graph = graph_of(node)

    def padded(value: ir.Value, count: int, name: str, fill: float = 0.0) -> ir.Value:
        *shape, width = dims(value)
        number = constant(graph, f"fill_{fill}", np.array(fill, dtype=np.float32))
        inputs = [value, integers(graph, f"pad_{count}", [0] * 7 + [count]), number]
        shape = [*shape, width + count]
        return op_before(node, "Pad", inputs, dtype=value.dtype, shape=shape, suffix=f"_{name}_{count}")

    batch, heads, tokens, width = dims(key)
    column = [batch, heads, tokens, 1]
    bias = op_before(node, "Transpose", [bias], {"perm": [0, 1, 3, 2]}, dtype=key.dtype, shape=column)
    wider = [batch, heads, tokens, width + 1]
    key = op_before(node, "Concat", [key, bias], {"axis": 3}, dtype=key.dtype, shape=wider)
    query = padded(query, 1, "query", factor)
    rest = HEAD_DIM_STEP - 1 - static_dim(value, 3) % HEAD_DIM_STEP
    return padded(query, rest, "query"), padded(key, rest, "key"), padded(value, rest + 1, "value")


def first_channels(node: ir.Node, output: ir.Value, width: int) -> ir.Value:
    """Returns the first `width` channels of an attention's `output` [B, S, H, Dh], computed before `node`."""
    *shape, wide = dims(output)
    assert isinstance(wide, int)
    sizes = integers(graph_of(node), f"channels_{width}_of_{wide}", [width, wide - width])
    types = [(output.dtype, [*shape, size]) for size in (width, wide - width)]
    return ops_before(node, "Split", [output, sizes], {"axis": 3}, types=types)[0]
