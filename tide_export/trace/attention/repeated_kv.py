"""Finds keys and values that a model repeats for the query heads that share them, and takes them before they are.

Used by `explicit`: a model that computes attention by itself may expand its keys and values first (Falcon's
`new_decoder_architecture` does). They are cached once for each group all the same.
"""

import numpy as np
import onnx_ir as ir

SWAP_HEADS = (0, 2, 1, 3)  # [B, H, S, Dh] <-> [B, S, H, Dh]


def ungrouped(value: ir.Value) -> ir.Value:
    """Keys or values [B, G, S, Dh] that are repeated for the R query heads that share them, before they are.

    Follows [B, G * R, S, Dh] back through a rotation and the transposition of heads to an expansion of [B, S, G, 1, Dh]
    to [B, S, G, R, Dh], and does without it; anything else stays as it is.
    """
    rotation = _behind(value, "RotaryEmbedding")
    swap = _behind(rotation.inputs[0] if rotation is not None else value, "Transpose")
    merge = _behind(swap.inputs[0], "Reshape") if swap is not None else None
    expand = _behind(merge.inputs[0], "Expand") if merge is not None else None
    if swap is None or merge is None or expand is None or tuple(swap.attributes.get_ints("perm", [])) != SWAP_HEADS:
        return value
    single, repeated, merged = expand.inputs[0], expand.outputs[0], merge.outputs[0]
    if single is None or single.shape is None or repeated.shape is None or merged.shape is None or value.shape is None:
        return value
    before, after, flat = list(single.shape), list(repeated.shape), list(merged.shape)
    if len(before) != 5 or len(flat) != 4 or before[3] != 1 or [*before[:3], *before[4:]] != [*after[:3], *after[4:]]:
        return value
    groups, repeats = after[2], after[3]
    if not isinstance(groups, int) or not isinstance(repeats, int) or flat[2] != groups * repeats:
        return value
    graph = value.producer().graph  # type: ignore[union-attr]
    assert isinstance(graph, ir.Graph)
    anchor = rotation or swap
    shape = _shape(graph, f"merge_{groups}_groups", [0, 0, groups, -1])
    batch, tokens, width = before[0], before[1], before[4]

    def add(op_type: str, inputs: list[ir.Value | None], attributes: dict, dims: list) -> ir.Value:
        node = ir.node(op_type, inputs, attributes=attributes, name=f"{anchor.name}/ungrouped_{op_type}")
        (output,) = node.outputs
        output.name, output.type, output.shape = node.name, value.type, ir.Shape(dims)
        graph.insert_before(anchor, node)
        return output

    result = add("Reshape", [single, shape], {}, [batch, tokens, groups, width])
    result = add("Transpose", [result], {"perm": list(SWAP_HEADS)}, [batch, groups, tokens, width])
    if rotation is not None:
        kept = {name: item for name, item in rotation.attributes.items() if name != "num_heads"}
        result = add(
            "RotaryEmbedding",
            [result, *rotation.inputs[1:]],
            {**kept, "num_heads": groups},
            [batch, groups, tokens, width],
        )
    return result


def _behind(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def _shape(graph: ir.Graph, name: str, dims: list[int]) -> ir.Value:
    """The initializer `name`, made the first time."""
    found = graph.initializers.get(name)
    if found is None:
        found = ir.Value(
            name=name,
            shape=ir.Shape([len(dims)]),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.tensor(np.array(dims, dtype=np.int64), name=name),
        )
        graph.register_initializer(found)
    return found
