"""Replaces `GroupQueryAttention` by an operator of `cpp/ops` with the same inputs and attributes.

`tide::TideFloatAttention` reads keys and values once for all query heads that share them. It is a model-local function
too, GroupQueryAttention itself, which ONNX Runtime inlines where the library is not registered.

`tide::TideInt8Attention` keeps keys and values in int8. A token's keys of a head are a row of int8 numbers and, in the
row's last bytes, their scale: the largest magnitude over 127. Values likewise. New ones are rounded before anything
attends to them, so that the K/V cache depends on the text alone. It is no function: standard operators have no such
buffer.
"""

from collections.abc import Iterable

import onnx_ir as ir

from tide_export import names
from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV, SCALE_BYTES
from tide_export.trace.rewriting import dims, nodes_of, present

PAST = (3, 4)  # inputs
INT = ir.AttributeType.INT


INPUTS = [
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink"),
]
OUTPUTS = ["output", "present_key", "present_value"]
ATTRIBUTES = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_interleaved"), INT),
    **dict.fromkeys(("scale", "softcap"), ir.AttributeType.FLOAT),
}


class CachedAttentionPass(ir.passes.InPlacePass):
    """After all passes that look for GroupQueryAttention; before sequences are packed."""

    def __init__(self, kv_cache: str):
        """`kv_cache`: "float32" or "int8"."""
        super().__init__()
        self.kv_cache = kv_cache

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, "GroupQueryAttention", "com.microsoft")
        if self.kv_cache == INT8_KV:
            read = {present(node.inputs[index]) for node in nodes for index in PAST}
            buffers = _Buffers(value for value in model.graph.inputs if value in read)
            buffers.follow(model.graph)
        elif nodes:
            function = float_attention_function()
            model.functions[function.identifier()] = function
        for node in nodes:
            node.op_type, node.domain = names.OP_CACHED_ATTENTION[self.kv_cache], names.DOMAIN
        return ir.passes.PassResult(model, modified=bool(nodes))


def float_attention_function() -> ir.Function:
    """Defines `TideFloatAttention`: GroupQueryAttention with the same inputs and attributes."""
    inputs, outputs = ([ir.Value(name=name) for name in taken] for taken in (INPUTS, OUTPUTS))
    attributes = [ir.RefAttr(name, name, kind) for name, kind in ATTRIBUTES.items()]
    node = ir.Node("com.microsoft", "GroupQueryAttention", inputs, attributes, outputs=outputs, name="attention")
    name = names.OP_CACHED_ATTENTION[FLOAT32_KV]
    body = ir.Graph(inputs, outputs, nodes=[node], opset_imports={"com.microsoft": 1}, name=name)
    return ir.Function(
        names.DOMAIN, name, graph=body, attributes=[ir.Attr(name, kind, None) for name, kind in ATTRIBUTES.items()]
    )


class _Buffers(set[ir.Value]):
    """K/V buffers, whose types become int8 as they are added."""

    def __init__(self, inputs: Iterable[ir.Value]):
        super().__init__()
        for value in inputs:
            self._take(value)

    def follow(self, graph: ir.Graph) -> None:
        """Adds what the graph makes of buffers: their present forms and copies, in branches and after them."""
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self.follow(attribute.as_graph())
            if node.op_type == "GroupQueryAttention":
                for output in node.outputs[1:]:
                    self._take(output)
            elif node.op_type == "Identity" and node.inputs[0] in self:
                self._take(node.outputs[0])
            elif node.op_type == "If":
                branch = node.attributes["then_branch"].as_graph()
                for output, inner in zip(node.outputs, branch.outputs, strict=True):
                    if inner in self:
                        self._take(output)

    def _take(self, value: ir.Value) -> None:
        batch, heads, tokens, head_dim = dims(value)
        assert isinstance(head_dim, int)
        value.dtype = ir.DataType.INT8
        value.shape = ir.Shape([batch, heads, tokens, head_dim + SCALE_BYTES])
        self.add(value)
