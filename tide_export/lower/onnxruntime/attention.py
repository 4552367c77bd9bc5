"""Replaces `tide::TideAttention` by attention to K/V pages.

The operator rotates queries and keys, writes keys and values into pages, and attends.

It takes [1, N, heads * head_dim], so the Reshape and Transpose pairs around the traced attention disappear; if query
and key are rotated from tables just before, the rotation moves inside. Attention to an earlier layer's keys and values
has a query alone, reads that layer's pages and has no new pages.
"""

import onnx_ir as ir

from tide_export.graph.rewriting import (
    SWAP_HEADS,
    dims,
    drop_unused,
    ensure_none_left,
    integers,
    last_dim,
    nodes_of,
    op_before,
    ops_before,
    producer,
    rank,
    replace_value,
    require_arity,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_PAGED_ATTENTION


class PagedAttentionPass(ir.passes.InPlacePass):
    """Replaces every node, whose inputs are those that `compose` gives it.

    They are query, key and value, of which the last two may be absent; key pages, value pages, page table, lengths,
    starts or none, sinks or none, a bias by head and key position or none, and a bias by distance if there is one.
    """

    def __init__(self, kv_cache: str):
        """`kv_cache`: "float32" or "int8"."""
        super().__init__()
        self.op_type = OP_PAGED_ATTENTION[kv_cache]

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_ATTENTION, inputs=[10, 11], outputs=[1, 3])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_ATTENTION, DOMAIN)
        for node in nodes:
            _lower(model.graph, node, self.op_type)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_ATTENTION, DOMAIN))


def _lower(graph: ir.Graph, node: ir.Node, op_type: str) -> None:
    query, key, value, *pages, table, lengths, starts, sinks, bias, distance_bias = [*node.inputs, None][:11]
    heads, kv_heads, head_dim = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads", "head_dim"))
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()}
    if "window" in node.attributes:
        attributes["local_window_size"] = node.attributes["window"].as_int()
    if "softcap" in node.attributes:
        attributes["softcap"] = node.attributes["softcap"].as_float()
    tables: list[ir.Value | None] = [None, None]
    rotation = common_rotation([item for item in (query, key) if item is not None])
    if rotation is not None:
        query, key = (item and required(item.producer()).inputs[0] for item in (query, key))
        tables = list(rotation.inputs[1:3])
        attributes["rotary_interleaved"] = rotation.attributes.get_int("interleaved", 0)
        attributes["rotary_embedding_dim"] = rotation.attributes.get_int("rotary_embedding_dim", 0)
    inputs = [
        item and flat(graph, node, item, count * head_dim, suffix)
        for item, count, suffix in ((query, heads, "_q"), (key, kv_heads, "_k"), (value, kv_heads, "_v"))
    ]
    if distance_bias is not None:
        distance_bias = flat(graph, node, distance_bias, heads * static_dim(distance_bias, -1), "_distances")
    inputs += [*pages, table, lengths, starts, *tables, bias, sinks, distance_bias]
    while inputs[-1] is None:
        inputs.pop()
    old = node.outputs[0]
    width = [] if old.shape is None else [heads * head_dim]
    shape = [*dims(old)[:2], *width] if width else None
    types = [(old.dtype, shape), *((value.dtype, value.shape) for value in node.outputs[1:])]
    attended, *written = ops_before(node, op_type, inputs, attributes, domain=DOMAIN, types=types)
    replace_output(graph, node, attended, heads, head_dim)
    for before, after in zip(node.outputs[1:], written, strict=True):
        replace_value(before, after)
    drop_unused([node])


def common_rotation(values: list[ir.Value]) -> ir.Node | None:
    """The rotary node of the first of `values` if all are rotated alike by the same tables."""
    nodes = [producer(value, "RotaryEmbedding") for value in values]
    kinds = {
        (*node.inputs[1:], *(node.attributes.get_int(name, 0) for name in ("interleaved", "rotary_embedding_dim")))
        for node in nodes
        if node is not None and len(node.inputs) == 4
    }
    return nodes[0] if None not in nodes and len(kinds) == 1 else None


def flat(graph: ir.Graph, node: ir.Node, value: ir.Value, width: int, suffix: str) -> ir.Value:
    """Returns `value` [B, heads, S, head_dim] as [B, S, width].

    This is the value that was split into heads, if there is one.
    """
    swap = producer(value, "Transpose")
    if swap is not None and list(swap.attributes.get_ints("perm", [])) == SWAP_HEADS:
        split = required(swap.inputs[0])
    else:
        kept = None if value.shape is None else [dims(value)[axis] for axis in SWAP_HEADS]
        split = op_before(
            node, "Transpose", [value], {"perm": SWAP_HEADS}, dtype=value.dtype, shape=kept, suffix=suffix
        )
    reshape = producer(split, "Reshape")
    merged = reshape.inputs[0] if reshape is not None else None
    if merged is not None and rank(merged) == 3 and last_dim(merged) == width:
        return merged
    shape = integers(graph, "merge_heads", [0, 0, -1])
    kept = None if split.shape is None else [*dims(split)[:2], width]
    return op_before(node, "Reshape", [split, shape], dtype=value.dtype, shape=kept, suffix=suffix)


def replace_output(graph: ir.Graph, node: ir.Node, attended: ir.Value, heads: int, head_dim: int) -> None:
    """Makes readers of the traced output read `attended` [B, S, heads * head_dim].

    The output is [B, S, heads, head_dim]: readers that merge the heads read `attended` directly, others through a
    Reshape.
    """
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
