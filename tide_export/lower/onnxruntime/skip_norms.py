"""A residual addition followed by a norm becomes one operator that gives both the norm and the sum.

`Add` + `RMSNormalization` -> `SkipSimplifiedLayerNormalization`, `Add` + `LayerNormalization` ->
`SkipLayerNormalization`. ONNX Runtime fuses neither by itself where the sum has another reader, which a residual stream
always has.

Postcondition: no such pair is left where both addends are states [B, S, D] and the norm is over D.
"""

import onnx_ir as ir

from tide_export.lower.rewriting import add_before, drop_unused, is_weight, nodes_of, producer

FUSED = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}


class SkipNormsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for op_type, fused in FUSED.items():
            for norm in nodes_of(model, op_type):
                add = producer(norm.inputs[0], "Add")
                if add is None or add.graph is not norm.graph or not _adds_states(add) or not _over_last_axis(norm):
                    continue
                total, normed = add.outputs[0], norm.outputs[0]
                kind = (total.dtype, total.shape)
                attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
                skip = add_before(
                    add,
                    fused,
                    [*add.inputs, *norm.inputs[1:]],
                    attributes,
                    domain="com.microsoft",
                    outputs=[kind, (None, None), (None, None), kind],
                )
                for unused in skip.outputs[1:3]:
                    unused.name = ""
                for old, new in ((normed, skip.outputs[0]), (total, skip.outputs[3])):
                    name = old.name
                    old.replace_all_uses_with(new, replace_graph_outputs=True)
                    new.name = name
                drop_unused([norm, add])
                modified = True
        return ir.passes.PassResult(model, modified=modified)


def _adds_states(add: ir.Node) -> bool:
    a, b = add.inputs
    if a is None or b is None or a.shape is None or b.shape is None:
        return False
    return not a.is_initializer() and not b.is_initializer() and len(a.shape) == 3 and a.shape == b.shape


def _over_last_axis(norm: ir.Node) -> bool:
    return norm.attributes.get_int("axis", -1) in (-1, 2) and all(is_weight(value, 1) for value in norm.inputs[1:])
