"""Replaces `tide::TideAttention` by ONNX Runtime's GroupQueryAttention on the slots' K/V buffers.

The operator rotates queries and keys, writes keys and values into the buffers that it is given as past and as present,
[B, kv_heads, C, head_dim], and attends. The length of each slot is an input on the GPU, `seqlens_k`. The length of the
longest, `total_sequence_length`, is one on the CPU: here the capacity C, a constant, so that no run waits for the host
and every run of a size does the same work. So no run is a "first prompt" to the operator, and it takes one sequence, or
one token of each of several (`group_query_attention_helper.h` of onnxruntime 1.31).
"""

import numpy as np
import onnx_ir as ir

from tide_export.compose.cut import attention_inputs
from tide_export.compose.passes.shared_keys import KV_LAYER
from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import (
    INT32,
    INT64,
    constant,
    dims,
    drop_unused,
    ensure_none_left,
    integers,
    nodes_of,
    op_before,
    ops_before,
    replace_value,
    require_arity,
    required,
    static_dim,
)
from tide_export.lower.onnxruntime.attention import common_rotation, flat, replace_output
from tide_export.names.operators import DOMAIN, OP_ATTENTION
from tide_export.names.segment_networks import TOKEN_INDICES

LENGTHS, POSITIONS, SINKS = 5, 6, 8  # inputs
GROUP_QUERY_ATTENTION, MICROSOFT = "GroupQueryAttention", "com.microsoft"
HEAD_MULTIPLE, ROTATED_MULTIPLE = 8, 16  # of head_dim; where the operator rotates


class GroupQueryAttentionPass(ir.passes.InPlacePass):
    """Replaces the nodes that `compose.segments` gives, which `check_attention` takes."""

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_ATTENTION, inputs=[10], outputs=[3])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_ATTENTION, DOMAIN)
        if nodes:
            ends = _last_positions(model.graph, nodes[0])
            for node in nodes:
                _lower(model.graph, node, ends)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_ATTENTION, DOMAIN))


def check_attention(node: ir.Node, where: str) -> None:
    """Checks that GroupQueryAttention on CUDA computes a traced attention.

    Raises:
        UnsupportedModelError: it has what the operator lacks.
    """
    _, key, _, _, bias, distance_bias = attention_inputs(node)
    reason, head_dim = None, node.attributes["head_dim"].as_int()
    if bias is not None:
        reason = "a bias by key position (ALiBi)"
    elif distance_bias is not None:
        reason = "a bias by distance"
    elif key is None or KV_LAYER in node.attributes:
        reason = "the keys and values of an earlier layer"
    elif head_dim % HEAD_MULTIPLE:
        reason = f"heads of {head_dim} numbers, no multiple of {HEAD_MULTIPLE}"
    if reason is not None:
        raise UnsupportedModelError(
            f"the attention of {where} has {reason}, for which ONNX Runtime's GroupQueryAttention has no CUDA "
            "kernel: use target onnxruntime"
        )


def _last_positions(graph: ir.Graph, first: ir.Node) -> ir.Value:
    """Adds `seqlens_k`, int32 [B], before the first attention: the position of each slot's last token."""
    lengths = required(first.inputs[LENGTHS])
    (indices,) = (value for value in graph.inputs if value.name == TOKEN_INDICES)
    last = op_before(first, "Gather", [indices, integers(graph, "last", [-1])], {"axis": 0}, dtype=INT64, shape=[1])
    ends = op_before(first, "Add", [lengths, last], dtype=INT64, shape=dims(lengths), suffix="_ends")
    return op_before(first, "Cast", [ends], {"to": INT32.value}, dtype=INT32, shape=dims(lengths), suffix="_ends")


def _lower(graph: ir.Graph, node: ir.Node, ends: ir.Value) -> None:
    query, key, value, past_key, past_value = map(required, node.inputs[:LENGTHS])
    heads, kv_heads, width = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads", "head_dim"))
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()}
    if "window" in node.attributes:
        attributes["local_window_size"] = node.attributes["window"].as_int()
    if "softcap" in node.attributes:
        attributes["softcap"] = node.attributes["softcap"].as_float()
    capacity = static_dim(past_key, 2)
    tables: list[ir.Value | None] = [None, None]
    rotation = common_rotation([query, key])
    if rotation is not None and _rotates(rotation, node, capacity):
        query, key = (required(required(item.producer()).inputs[0]) for item in (query, key))
        tables = list(rotation.inputs[1:3])
        attributes |= {"do_rotary": 1, "rotary_interleaved": rotation.attributes.get_int("interleaved", 0)}
    total = constant(graph, "total_sequence_length", np.array(capacity, dtype=np.int32))
    new = [
        flat(graph, node, item, count * width, suffix)
        for item, count, suffix in ((query, heads, "_q"), (key, kv_heads, "_k"), (value, kv_heads, "_v"))
    ]
    inputs = [*new, past_key, past_value, ends, total, *tables, None, None, node.inputs[SINKS]]
    while inputs[-1] is None:
        inputs.pop()
    old = node.outputs[0]
    types = [(old.dtype, [*dims(old)[:2], heads * width]), *((each.dtype, each.shape) for each in node.outputs[1:])]
    results = ops_before(node, GROUP_QUERY_ATTENTION, inputs, attributes, domain=MICROSOFT, types=types)
    replace_output(graph, node, results[0], heads, width)
    for before, after in zip(node.outputs[1:], results[1:], strict=True):
        replace_value(before, after)
    drop_unused([node])


def _rotates(rotation: ir.Node, node: ir.Node, capacity: int) -> bool:
    """Whether the operator can rotate as `rotation` does: at the tokens' positions, by long enough tables."""
    table = required(rotation.inputs[1])
    if rotation.inputs[3] is not node.inputs[POSITIONS] or not table.is_initializer():
        return False
    rows, columns = dims(table)
    head_dim, rotated = node.attributes["head_dim"].as_int(), rotation.attributes.get_int("rotary_embedding_dim", 0)
    fits = isinstance(rows, int) and rows >= capacity and isinstance(columns, int) and columns % HEAD_MULTIPLE == 0
    return fits and head_dim % ROTATED_MULTIPLE == 0 and (rotated or head_dim) == 2 * columns
