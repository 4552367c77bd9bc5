"""Replaces `tide::TideAttention` by `com.microsoft.GroupQueryAttention`, which rotates, appends to the K/V cache and
attends.

With past and present bound to the same memory, the new keys and values are written in place. The operator takes [B, S,
heads * head_dim], so the Reshape and Transpose pairs around the traced attention disappear; if query and key are
rotated from tables just before, the rotation moves inside. Attention to an earlier layer's keys and values gets none of
its own (no tokens), reads that layer's buffers, and has no present outputs.
"""

import numpy as np
import onnx_ir as ir

from tide_export.names import DOMAIN, OP_ATTENTION
from tide_export.trace.rewriting import (
    INT32,
    SWAP_HEADS,
    constant,
    drop_unused,
    ensure_none_left,
    integers,
    last_dim,
    new_node,
    nodes_of,
    op_before,
    ops_before,
    present,
    producer,
    rank,
    replace_value,
    require_arity,
)

ROTATED = 16  # the operator rotates heads of a multiple of this width only


class GroupQueryAttentionPass(ir.passes.InPlacePass):
    """Inputs of each node: query, key and value or none, past key, past value, total length (int32 []), sinks or none,
    and a bias [1, heads, tokens, total length] or none, as `compose` gives them; batch 1."""

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_ATTENTION, inputs=[8], outputs=[1, 3])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_ATTENTION, DOMAIN)
        if nodes:
            last_index = _last_index(model.graph, present(nodes[0].inputs[5]))
            for node in nodes:
                _lower(model.graph, node, last_index)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_ATTENTION, DOMAIN))


def _last_index(graph: ir.Graph, total: ir.Value) -> ir.Value:
    """int32 [1], total length - 1, which the operator calls seqlens_k; computed once, first in the main graph."""
    one = constant(graph, "one_int32", np.array([1], dtype=np.int32))
    node = new_node("Sub", [total, one], name="main/seqlens_k", outputs=[(INT32, [1])])
    graph.insert_before(graph[0], node)
    return node.outputs[0]


def _lower(graph: ir.Graph, node: ir.Node, last_index: ir.Value) -> None:
    query, key, value, past_key, past_value, total, sinks, bias = node.inputs
    heads, kv_heads, head_dim = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads", "head_dim"))
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()}
    if "window" in node.attributes:
        attributes["local_window_size"] = node.attributes["window"].as_int()
    if "softcap" in node.attributes:
        attributes["softcap"] = node.attributes["softcap"].as_float()
    cos = sin = None
    rotations = _common_rotation(query, key) if head_dim % ROTATED == 0 else None
    if rotations is not None:
        query, key = rotations[0].inputs[0], rotations[1].inputs[0] if key is not None else None
        cos, sin = rotations[0].inputs[1:3]
        attributes["do_rotary"] = 1
        attributes["rotary_interleaved"] = rotations[0].attributes.get_int("interleaved", 0)
    optional = [cos, sin, None, bias, sinks]  # the third: position ids, which follow from the total length
    while optional and optional[-1] is None:
        optional.pop()
    inputs = [
        _flat(graph, node, item, count * head_dim, suffix) if item is not None else _no_tokens(graph, count * head_dim)
        for item, count, suffix in ((query, heads, "_q"), (key, kv_heads, "_k"), (value, kv_heads, "_v"))
    ]
    batch, tokens = (list(node.outputs[0].shape)[:2]) if node.outputs[0].shape is not None else (1, None)
    dtype = node.outputs[0].dtype
    buffers = [(dtype, present(past).shape) for past in (past_key, past_value)][: len(node.outputs) - 1]
    attended, *presents = ops_before(
        node,
        "GroupQueryAttention",
        [*inputs, past_key, past_value, last_index, total, *optional],
        attributes,
        domain="com.microsoft",
        types=[(dtype, [batch, tokens, heads * head_dim]), *buffers],
    )
    _replace_output(graph, node, attended, heads, head_dim)
    for old, new in zip(node.outputs[1:], presents, strict=True):
        replace_value(old, new)
    drop_unused([node])


def _common_rotation(query: ir.Value | None, key: ir.Value | None) -> tuple[ir.Node, ir.Node] | None:
    """The rotary nodes of query and key (the query's twice if there is no key) if both rotate alike by the same
    tables."""
    q = producer(query, "RotaryEmbedding")
    k = producer(key, "RotaryEmbedding") if key is not None else q
    if q is None or k is None or len(q.inputs) != 4 or list(q.inputs[1:]) != list(k.inputs[1:]):
        return None
    same = all(
        q.attributes.get_int(n, 0) == k.attributes.get_int(n, 0) for n in ("interleaved", "rotary_embedding_dim")
    )
    return (q, k) if same and q.attributes.get_int("rotary_embedding_dim", 0) == 0 else None


def _flat(graph: ir.Graph, node: ir.Node, value: ir.Value, width: int, suffix: str) -> ir.Value:
    """`value` [B, heads, S, head_dim] as [B, S, width]: the value that was split into heads, if there is one."""
    swap = producer(value, "Transpose")
    if swap is not None and list(swap.attributes.get_ints("perm", [])) == SWAP_HEADS:
        split = swap.inputs[0]
    else:
        split = op_before(node, "Transpose", [value], {"perm": SWAP_HEADS}, dtype=value.dtype, suffix=suffix)
    reshape = producer(split, "Reshape")
    merged = reshape.inputs[0] if reshape is not None else None
    if merged is not None and rank(merged) == 3 and last_dim(merged) == width:
        return merged
    shape = integers(graph, "merge_heads", [0, 0, -1])
    return op_before(node, "Reshape", [split, shape], dtype=value.dtype, suffix=suffix)


def _no_tokens(graph: ir.Graph, width: int) -> ir.Value:
    return constant(graph, f"no_tokens_{width}", np.zeros((1, 0, width), dtype=np.float32))


def _replace_output(graph: ir.Graph, node: ir.Node, attended: ir.Value, heads: int, head_dim: int) -> None:
    """Makes readers of the traced output [B, S, heads, head_dim] read `attended` [B, S, heads * head_dim]: those that
    merge the heads read it directly, others through a Reshape."""
    old = node.outputs[0]
    for reader, _ in list(old.uses()):
        merged = reader.outputs[0]
        if reader.op_type == "Reshape" and rank(merged) == 3 and last_dim(merged) == heads * head_dim:
            merged.replace_all_uses_with(attended, replace_graph_outputs=True)
            drop_unused([reader])
    if old.uses():
        shape = integers(graph, f"split_heads_{heads}", [0, 0, heads, head_dim])
        split = op_before(node, "Reshape", [attended, shape], dtype=old.dtype, shape=old.shape, suffix="_split")
        old.replace_all_uses_with(split)
