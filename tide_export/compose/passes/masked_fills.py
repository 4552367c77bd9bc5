"""Writing one number to the places of a mask becomes Where, which needs no list of the places.

`x[mask] = number` is traced as NonZero, which gives as many places as there are, and ScatterND. Models that also read
images do so to the token ids of image places (Gemma 3). TensorRT for RTX has no NonZero, and no engine likes a shape
that depends on data.

Precondition: `StaticReshapesPass` has run. Postcondition: a ScatterND onto a tensor of the mask's shape, at all places
of the mask, of one number repeated, is a Where.
"""

import onnx_ir as ir


class MaskedFillsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            found = _masked_fill(node)
            if found is None:
                continue
            data, mask, number = found
            (output,) = node.outputs
            new = ir.node("Where", [mask, number, data], name=f"{node.name}/Where")
            new.outputs[0].name = f"{output.name}_filled"
            new.outputs[0].type, new.outputs[0].shape = output.type, output.shape
            model.graph.insert_before(node, new)
            output.replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _masked_fill(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """What is filled, the mask and the number, of a ScatterND that is such a writing."""
    if (node.domain, node.op_type) != ("", "ScatterND") or node.attributes.get_string("reduction", "none") != "none":
        return None
    data, places, numbers = node.inputs
    turned, repeated = _producer(places, "Transpose"), _producer(numbers, "Expand")
    listing = _producer(turned.inputs[0], "NonZero") if turned is not None else None
    if data is None or listing is None or repeated is None:
        return None
    mask, number = listing.inputs[0], repeated.inputs[0]
    if mask is None or number is None or data.shape is None or number.shape is None:
        return None
    same = mask.dtype == ir.DataType.BOOL and mask.shape == data.shape
    return (data, mask, number) if same and not len(number.shape) else None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
