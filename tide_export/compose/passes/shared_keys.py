"""Marks attentions that read the keys and values of an earlier layer.

They then read that layer's K/V cache.

Runs on the trace before it is cut. Such a layer has no K/V cache of its own. When it runs, the earlier layer has run
over the same tokens, in the same segment or in one before it, so its cache holds all that the layer attends to: a
segment never holds more tokens than those before it.
"""

import onnx_ir as ir

from tide_export.graph.rewriting import nodes_of
from tide_export.names.operators import DOMAIN, OP_ATTENTION

KV_LAYER = "kv_layer"  # attribute of such an attention: the layer whose K/V it reads; it then has no key and value


class SharedKeysPass(ir.passes.InPlacePass):
    """Runs after common subexpressions are merged.

    Keys and values are shared where they are one value.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        layers: dict[tuple[ir.Value | None, ...], int] = {}
        modified = False
        for node in nodes_of(model.graph, OP_ATTENTION, DOMAIN):
            layer = node.attributes["layer"].as_int()
            source = layers.setdefault(tuple(node.inputs[1:3]), layer)
            if source == layer:
                continue
            node.attributes[KV_LAYER] = ir.AttrInt64(KV_LAYER, source)
            for index in (1, 2):
                node.replace_input_with(index, None)
            modified = True
        return ir.passes.PassResult(model, modified=modified)
