"""Reshape targets computed from the shape of input_ids become constants that copy the input's own dimensions.

Runs on the trace before it is cut: behind a checkpoint the number of tokens is no longer that of input_ids, so a target
shape built from it would be wrong there.

Postcondition: a Reshape whose symbolic output dimensions all equal the input's dimension at the same place (or all but
one do) takes a constant shape with 0 for "as the input" and at most one -1; one that changes nothing is gone.
"""

import numpy as np
import onnx_ir as ir


class StaticReshapesPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        shapes: dict[tuple[int, ...], ir.Value] = {}
        for node in model.graph:
            if node.op_type != "Reshape" or node.domain != "":
                continue
            target = _static_target(node)
            if target is None:
                continue
            modified = True
            if _same_shape(node):
                data = node.inputs[0]
                assert data is not None
                node.outputs[0].replace_all_uses_with(data, replace_graph_outputs=True)
                model.graph.remove(node, safe=True)
                continue
            if target not in shapes:
                name = "shape_" + "_".join("m1" if dim == -1 else str(dim) for dim in target)
                shapes[target] = ir.Value(
                    name=name,
                    shape=ir.Shape([len(target)]),
                    type=ir.TensorType(ir.DataType.INT64),
                    const_value=ir.tensor(np.array(target, dtype=np.int64), name=name),
                )
                model.graph.register_initializer(shapes[target])
            node.replace_input_with(1, shapes[target])
            node.attributes.pop("allowzero", None)
        return ir.passes.PassResult(model, modified=modified)


def _same_shape(node: ir.Node) -> bool:
    data, output = node.inputs[0], node.outputs[0]
    return data is not None and data.shape == output.shape


def _static_target(node: ir.Node) -> tuple[int, ...] | None:
    data, output = node.inputs[0], node.outputs[0]
    if data is None or data.shape is None or output.shape is None:
        return None
    target = []
    for axis, dim in enumerate(output.shape):
        if isinstance(dim, int):
            target.append(dim)
        elif axis < len(data.shape) and data.shape[axis] == dim:
            target.append(0)
        else:
            target.append(-1)
    # A real dimension of 0 would be read as "copy"; none occurs in a model, but -1 twice does.
    return tuple(target) if target.count(-1) <= 1 and 0 not in [d for d in output.shape if isinstance(d, int)] else None
