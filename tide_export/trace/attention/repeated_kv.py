"""Removes the repetition of keys and values, so that attention reads each K/V head once.

Used by `matching`: a model that computes attention itself may expand its keys and values for the query heads that share
them (Falcon's `new_decoder_architecture` does). The cache then still holds one K/V head per group.
"""

import onnx_ir as ir

from tide_export.graph.rewriting import SWAP_HEADS, dims, graph_of, integers, op_before, producer, rank


def ungrouped(value: ir.Value) -> ir.Value:
    """Keys or values [B, G, S, Dh] before they are repeated for the R query heads that share each.

    Follows [B, G * R, S, Dh] back to an expansion of [B, G, 1, S, Dh] to [B, G, R, S, Dh]; or through a rotation and
    the transposition of heads to one of [B, S, G, 1, Dh] to [B, S, G, R, Dh], and rebuilds the steps without it.
    Returns any other value unchanged.
    """
    single = _repeated_last(value)
    if single is not None:
        return single
    rotation = producer(value, "RotaryEmbedding")
    swap = producer(rotation.inputs[0] if rotation is not None else value, "Transpose")
    merge = producer(swap.inputs[0], "Reshape") if swap is not None else None
    expand = producer(merge.inputs[0], "Expand") if merge is not None else None
    if swap is None or merge is None or expand is None or list(swap.attributes.get_ints("perm", [])) != SWAP_HEADS:
        return value
    single, repeated, merged = expand.inputs[0], expand.outputs[0], merge.outputs[0]
    if [rank(item) for item in (single, repeated, merged)] != [5, 5, 4] or value.shape is None:
        return value
    before, after, flat = dims(single), dims(repeated), dims(merged)
    if before[3] != 1 or [*before[:3], *before[4:]] != [*after[:3], *after[4:]]:
        return value
    groups, repeats = after[2], after[3]
    if not isinstance(groups, int) or not isinstance(repeats, int) or flat[2] != groups * repeats:
        return value
    anchor = rotation or swap
    shape = integers(graph_of(anchor), f"merge_{groups}_groups", [0, 0, groups, -1])
    batch, tokens, width = before[0], before[1], before[4]

    def add(op_type: str, inputs: list[ir.Value | None], attributes: dict, *shape: int | ir.SymbolicDim) -> ir.Value:
        return op_before(anchor, op_type, inputs, attributes, dtype=value.dtype, shape=shape, suffix="_ungrouped")

    result = add("Reshape", [single, shape], {}, batch, tokens, groups, width)
    result = add("Transpose", [result], {"perm": SWAP_HEADS}, batch, groups, tokens, width)
    if rotation is not None:
        attributes = {**rotation.attributes, "num_heads": groups}
        result = add("RotaryEmbedding", [result, *rotation.inputs[1:]], attributes, batch, groups, tokens, width)
    return result


def _repeated_last(value: ir.Value) -> ir.Value | None:
    """Returns [B, G, S, Dh] that `value` [B, G * R, S, Dh] repeats after heads are transposed, if it does."""
    merge = producer(value, "Reshape")
    expand = producer(merge.inputs[0], "Expand") if merge is not None else None
    split = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if expand is None or split is None:
        return None
    single, repeated = split.inputs[0], expand.outputs[0]
    if [rank(item) for item in (single, split.outputs[0], repeated, value)] != [4, 5, 5, 4]:
        return None
    batch, groups, tokens, width = dims(single)
    apart = dims(split.outputs[0]) == [batch, groups, 1, tokens, width]
    return single if apart and dims(repeated)[1] == groups and dims(value)[2:] == [tokens, width] else None
