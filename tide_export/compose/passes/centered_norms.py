"""Replaces an RMS norm of states less their mean by the layer norm that it is (Cohere)."""

import onnx_ir as ir

from tide_export.graph.rewriting import (
    ensure_none_left,
    is_weight,
    last_dim,
    nodes_of,
    op_before,
    producer,
    rank,
    replace_value,
)


class CenteredNormsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [(node, x) for node in nodes_of(model.graph, "RMSNormalization") if (x := _centered(node)) is not None]
        for node, x in found:
            old = node.outputs[0]
            attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
            inputs = [x, node.inputs[1]]
            new = op_before(node, "LayerNormalization", inputs, attributes, dtype=old.dtype, shape=old.shape)
            replace_value(old, new)
        return ir.passes.PassResult(model, modified=bool(found))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(node for node in nodes_of(model.graph, "RMSNormalization") if _centered(node) is not None)


def _centered(norm: ir.Node) -> ir.Value | None:
    """Returns the states whose mean over the last axis is subtracted before the norm; None: it is not."""
    last = (rank(norm.inputs[0]) or 0) - 1
    difference = producer(norm.inputs[0], "Sub")
    mean = producer(difference.inputs[1], "ReduceMean") if difference is not None else None
    if difference is None or mean is None or mean.inputs[0] is not difference.inputs[0] or len(mean.inputs) < 2:
        return None
    axes = mean.inputs[1].const_value if mean.inputs[1] is not None else None
    if axes is None or axes.numpy().tolist() not in ([-1], [last]) or not mean.attributes.get_int("keepdims", 1):
        return None
    of_row = norm.attributes.get_int("axis", -1) in (-1, last) and is_weight(norm.inputs[1], 1)
    return difference.inputs[0] if of_row and last_dim(norm.inputs[1]) == last_dim(norm.inputs[0]) else None
