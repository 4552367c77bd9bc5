"""Gives the traced attentions of a piece their K/V cache: what `compose` and `batch` do right after inlining one."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from tide_export import names
from tide_export.compose.cut import bias_table, is_attention


def attend_from_cache(
    nodes: Sequence[ir.Node],
    past: Mapping[tuple[int, str], ir.Value],
    total: ir.Value,
    biases: Mapping[str, ir.Value],
) -> dict[str, ir.Value]:
    """Every TideAttention among `nodes` reads the buffers `past` (by layer and kind) and the length `total` (int32 []).

    Args:
        biases: what takes the place of a bias table, by the table's name; a table that is not in it stays.

    Returns:
        The buffers after the step, by output name.
    """
    presents = {}
    for node in filter(is_attention, nodes):
        layer = node.attributes["layer"].as_int()
        buffers = [past[layer, kind] for kind in ("key", "value")]
        more = list(node.inputs[3:])  # sinks and bias, where the model has them
        table = bias_table(node)
        if table is not None:
            more[-1] = biases.get(str(table.name), table)
        inputs = [*node.inputs[:3], *buffers, total, *more]
        node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        node.resize_outputs(3)
        for kind, value, buffer in zip(("key", "value"), node.outputs[1:], buffers, strict=True):
            value.name = f"{node.name}.{kind}"
            value.type, value.shape = buffer.type, buffer.shape
            presents[names.present(layer, kind)] = value
    return presents
