"""Replaces Reshape targets that are computed from the shape of input_ids by constants.

Runs on the trace before it is cut: after a checkpoint, the number of tokens is not that of input_ids, so a target
shape computed from it would be wrong there. A Reshape whose symbolic output dimensions all equal the input's dimension
at the same axis (or all but one do) gets a constant shape, with 0 for "as the input" and at most one -1; one that
changes nothing is removed.
"""

import onnx_ir as ir

from tide_export.graph.rewriting import dims, integers, nodes_of, required


class StaticReshapesPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        targets = [
            (node, target) for node in nodes_of(model.graph, "Reshape") if (target := _static_target(node)) is not None
        ]
        for node, target in targets:
            data, output = required(node.inputs[0]), node.outputs[0]
            if data.shape == output.shape:
                output.replace_all_uses_with(data, replace_graph_outputs=True)
                model.graph.remove(node, safe=True)
                continue
            name = "shape_" + "_".join("m1" if dim == -1 else str(dim) for dim in target)
            node.replace_input_with(1, integers(model.graph, name, target))
            node.attributes.pop("allowzero", None)
        return ir.passes.PassResult(model, modified=bool(targets))


def _static_target(node: ir.Node) -> list[int] | None:
    data, output = node.inputs[0], node.outputs[0]
    if data is None or data.shape is None or output.shape is None:
        return None
    shape, target = dims(data), list[int]()
    for axis, dim in enumerate(output.shape):
        if isinstance(dim, int):
            target.append(dim)
        else:
            target.append(0 if axis < len(shape) and shape[axis] == dim else -1)
    # A real dimension of 0 would be read as "as the input"; none occurs in a model, but -1 twice does.
    return target if target.count(-1) <= 1 and 0 not in [d for d in output.shape if isinstance(d, int)] else None
