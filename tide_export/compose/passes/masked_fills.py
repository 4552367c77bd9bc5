"""Replaces masked fills by Where, whose shape does not depend on data.

`x[mask] = number` is traced as NonZero, whose length is that of the mask's True cells, and ScatterND. Models that also
read images do so to the token ids of image positions (Gemma 3). TensorRT for RTX has no NonZero.
"""

import onnx_ir as ir

from tide_export.graph.rewriting import ensure_none_left, op_before, producer, rank, replace_value


class MaskedFillsPass(ir.passes.InPlacePass):
    """Runs after `StaticReshapesPass`, without which the repeated number is not recognized."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fills = [(node, fill) for node in model.graph if (fill := _masked_fill(node)) is not None]
        for node, (data, mask, number) in fills:
            (output,) = node.outputs
            where = op_before(node, "Where", [mask, number, data], dtype=output.dtype, shape=output.shape)
            replace_value(output, where)
        return ir.passes.PassResult(model, modified=bool(fills))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(node for node in model.graph if _masked_fill(node) is not None)


def _masked_fill(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Matches a ScatterND that writes one number wherever a mask is True.

    Returns the data, the mask of equal shape, and the number.
    """
    if (node.domain, node.op_type) != ("", "ScatterND") or node.attributes.get_string("reduction", "none") != "none":
        return None
    data, indices, numbers = node.inputs
    transpose, repeated = producer(indices, "Transpose"), producer(numbers, "Expand")
    nonzero = producer(transpose.inputs[0], "NonZero") if transpose is not None else None
    if data is None or nonzero is None or repeated is None:
        return None
    mask, number = nonzero.inputs[0], repeated.inputs[0]
    if mask is None or number is None or data.shape is None or rank(number) != 0:
        return None
    return (data, mask, number) if mask.dtype == ir.DataType.BOOL and mask.shape == data.shape else None
