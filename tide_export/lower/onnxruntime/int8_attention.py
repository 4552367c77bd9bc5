"""Keeps keys and values in int8: replaces `GroupQueryAttention` by `tide::TideInt8Attention`, an operator of `cpp/ops`.

It has the same inputs and attributes. A token's keys of a head are a row of int8 numbers and, in the row's last bytes,
their scale: the largest magnitude over 127. Values likewise. New ones are rounded before anything attends to them, so
that the K/V cache depends on the text alone. It has no function of standard operators: those have no buffer in place.
"""

from collections.abc import Iterable

import onnx_ir as ir

from tide_export import names
from tide_export.bundle.manifest import SCALE_BYTES
from tide_export.trace.rewriting import dims, nodes_of, present

PAST = (3, 4)  # inputs


class Int8AttentionPass(ir.passes.InPlacePass):
    """After all passes that look for GroupQueryAttention; before sequences are packed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, "GroupQueryAttention", "com.microsoft")
        read = {present(node.inputs[index]) for node in nodes for index in PAST}
        buffers = _Buffers(value for value in model.graph.inputs if value in read)
        buffers.follow(model.graph)
        for node in nodes:
            node.op_type, node.domain = names.OP_INT8_ATTENTION, names.DOMAIN
        return ir.passes.PassResult(model, modified=bool(nodes))


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
