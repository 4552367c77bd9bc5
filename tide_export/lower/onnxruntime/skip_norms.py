"""Fuses a residual addition and the norm after it into one operator.

It outputs both the norm and the sum.

`Add` + `RMSNormalization` -> `SkipSimplifiedLayerNormalization`, `Add` + `LayerNormalization` ->
`SkipLayerNormalization`. ONNX Runtime fuses neither if the sum has another reader, which a residual stream always has.
"""

from collections.abc import Iterator

import onnx_ir as ir

from tide_export.graph.rewriting import ensure_none_left, is_weight, nodes_of, ops_before, producer, rank, replace_value

FUSED = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}


class SkipNormsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for add, norm in _pairs(model):
            total, normalized = add.outputs[0], norm.outputs[0]
            kind = (total.dtype, total.shape)
            fused = ops_before(
                add,
                FUSED[norm.op_type],
                [*add.inputs, *norm.inputs[1:]],
                {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
                domain="com.microsoft",
                types=[kind, (None, None), (None, None), kind],
            )
            for unused in fused[1:3]:
                unused.name = ""
            replace_value(normalized, fused[0])
            replace_value(total, fused[3])
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(norm for _, norm in _pairs(model))


def _pairs(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Every addition of hidden states [B, S, D], and the norm over D after it."""
    for norm in [norm for op_type in FUSED for norm in nodes_of(model.graph, op_type)]:
        add = producer(norm.inputs[0], "Add")
        if add is not None and add.graph is norm.graph and _adds_hidden(add) and _over_last_axis(norm):
            yield add, norm


def _adds_hidden(add: ir.Node) -> bool:
    a, b = add.inputs
    if a is None or b is None or a.is_initializer() or b.is_initializer():
        return False
    return rank(a) == 3 and a.shape == b.shape


def _over_last_axis(norm: ir.Node) -> bool:
    return norm.attributes.get_int("axis", -1) in (-1, 2) and all(is_weight(value, 1) for value in norm.inputs[1:])
