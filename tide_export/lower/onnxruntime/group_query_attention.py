"""`tide::TideAttention` becomes `com.microsoft.GroupQueryAttention`, which rotates, appends to the K/V cache and
attends.

Bound to one memory, past and present are the same buffer and the new keys and values are written in place. The operator
takes [B, S, heads * head_dim], so the Reshape and Transpose pairs around the traced attention disappear; where query
and key are rotated from tables just before, the rotation moves inside.

Precondition: TideAttention has six inputs (query, key, value, past key, past value, total length) and where the model
has such things two more (attention sinks, and a bias [1, heads, tokens, total length] that is added to the scores), and
three outputs, as `compose` leaves it; batch 1. Postcondition: none is left; what only fed one is left unused.
"""

import numpy as np
import onnx_ir as ir

from tide_export.lower.rewriting import add_before, constant, drop_unused, last_dim, nodes_of, producer
from tide_export.names import DOMAIN, OP_ATTENTION

SWAP_HEADS = [0, 2, 1, 3]


class GroupQueryAttentionPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model, OP_ATTENTION, DOMAIN)
        if not nodes:
            return ir.passes.PassResult(model, modified=False)
        last_index = _last_index(model, nodes[0])
        for node in nodes:
            _lower(model, node, last_index)
        return ir.passes.PassResult(model, modified=True)


def _last_index(model: ir.Model, any_attention: ir.Node) -> ir.Value:
    """int32 [1], total length - 1: what the operator calls seqlens_k. Computed once, first thing in the main graph."""
    total = any_attention.inputs[5]
    one = constant(model, "one_int32", np.array([1], dtype=np.int32))
    node = ir.node("Sub", [total, one], num_outputs=1, name="main/seqlens_k")
    node.outputs[0].name = "main/seqlens_k"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT32), ir.Shape([1])
    model.graph.insert_before(model.graph[0], node)
    return node.outputs[0]


def _lower(model: ir.Model, node: ir.Node, last_index: ir.Value) -> None:
    query, key, value, past_key, past_value, total, *more = node.inputs
    sinks, bias = (*more, None, None)[:2]
    assert past_key is not None
    assert past_value is not None
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    head_dim = node.attributes["head_dim"].as_int()
    attributes = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": node.attributes["scale"].as_float(),
    }
    if "window" in node.attributes:
        attributes["local_window_size"] = node.attributes["window"].as_int()
    if "softcap" in node.attributes:
        attributes["softcap"] = node.attributes["softcap"].as_float()
    cos = sin = None
    rotations = _common_rotation(query, key)
    if rotations is not None:
        query, key = (rotation.inputs[0] for rotation in rotations)
        cos, sin = rotations[0].inputs[1:3]
        attributes["do_rotary"] = 1
        attributes["rotary_interleaved"] = rotations[0].attributes.get_int("interleaved", 0)
    optional = [cos, sin, None, bias, sinks]  # the third: position ids, which follow from the total length
    while optional and optional[-1] is None:
        optional.pop()
    inputs = [
        _flat(model, node, value, count, head_dim, suffix)
        for value, count, suffix in ((query, heads, "_q"), (key, kv_heads, "_k"), (value, kv_heads, "_v"))
    ]
    batch, tokens = (list(node.outputs[0].shape)[:2]) if node.outputs[0].shape is not None else (1, None)
    dtype = node.outputs[0].dtype
    fused = add_before(
        node,
        "GroupQueryAttention",
        [*inputs, past_key, past_value, last_index, total, *optional],
        attributes,
        domain="com.microsoft",
        outputs=[(dtype, [batch, tokens, heads * head_dim]), (dtype, past_key.shape), (dtype, past_value.shape)],
    )
    _replace_output(model, node, fused, heads, head_dim)
    for old, new in zip(node.outputs[1:], fused.outputs[1:], strict=True):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = old.name
    drop_unused([node])


def _common_rotation(query: ir.Value | None, key: ir.Value | None) -> tuple[ir.Node, ir.Node] | None:
    """The rotary nodes of query and key if both turn the same way by the same tables."""
    q, k = producer(query, "RotaryEmbedding"), producer(key, "RotaryEmbedding")
    if q is None or k is None or len(q.inputs) != 4 or list(q.inputs[1:]) != list(k.inputs[1:]):
        return None
    same = all(
        q.attributes.get_int(n, 0) == k.attributes.get_int(n, 0) for n in ("interleaved", "rotary_embedding_dim")
    )
    return (q, k) if same and q.attributes.get_int("rotary_embedding_dim", 0) == 0 else None


def _flat(
    model: ir.Model, node: ir.Node, value: ir.Value | None, heads: int, head_dim: int, suffix: str
) -> ir.Value | None:
    """`value` [B, heads, S, head_dim] as [B, S, heads * head_dim]: the value it was split from, where there is one."""
    assert value is not None
    swap = producer(value, "Transpose")
    if swap is not None and list(swap.attributes.get_ints("perm", [])) == SWAP_HEADS:
        split = swap.inputs[0]
    else:
        swapped = add_before(node, "Transpose", [value], {"perm": SWAP_HEADS}, suffix=suffix)
        split = swapped.outputs[0]
        split.type = value.type
    reshape = producer(split, "Reshape")
    if reshape is not None:
        merged = reshape.inputs[0]
        rank = len(merged.shape) if merged is not None and merged.shape is not None else None
        if rank == 3 and last_dim(merged) == heads * head_dim:
            return merged
    shape = constant(model, "merge_heads", np.array([0, 0, -1], dtype=np.int64))
    merged = add_before(node, "Reshape", [split, shape], suffix=suffix).outputs[0]
    merged.type = value.type
    return merged


def _replace_output(model: ir.Model, node: ir.Node, fused: ir.Node, heads: int, head_dim: int) -> None:
    """Readers of the traced output [B, S, heads, head_dim]: those that merge the heads again take the fused one."""
    old, new = node.outputs[0], fused.outputs[0]
    for reader, _ in list(old.uses()):
        if reader.op_type == "Reshape" and _merges_heads(reader, heads * head_dim):
            merged = reader.outputs[0]
            merged.replace_all_uses_with(new, replace_graph_outputs=True)
            drop_unused([reader])
    if old.uses():
        shape = constant(model, f"split_heads_{heads}", np.array([0, 0, heads, head_dim], dtype=np.int64))
        split = add_before(node, "Reshape", [new, shape], suffix="_split").outputs[0]
        split.type, split.shape = old.type, old.shape
        old.replace_all_uses_with(split)


def _merges_heads(reshape: ir.Node, width: int) -> bool:
    shape = reshape.outputs[0].shape
    return shape is not None and len(shape) == 3 and last_dim(reshape.outputs[0]) == width
