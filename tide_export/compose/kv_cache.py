"""Connects the traced attentions of an inlined piece to their K/V cache."""

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from tide_export import names
from tide_export.compose.cut import attention_inputs, is_attention, layer_of
from tide_export.compose.passes.shared_keys import KV_LAYER
from tide_export.trace.rewriting import FLOAT, typed_value


def attend_from_cache(
    nodes: Sequence[ir.Node],
    past: Mapping[tuple[int, str], ir.Value],
    positions: Sequence[ir.Value],
    biases: Mapping[str, ir.Value] | None = None,
) -> dict[str, ir.Value]:
    """Makes every TideAttention among `nodes` read and write K/V buffers.

    Its inputs become query, key, value, past key, past value, `positions`, sinks and bias (the last two may be absent);
    its outputs the attention's result, present key and present value. One that shares an earlier layer's keys and
    values has none of its own: its inputs are that layer's buffers with the new tokens in them, its output the result.

    Args:
        past: the buffers, by layer and kind; of layers in other segments as they are after those have run.
        positions: the inputs by which the target places the new tokens.
        biases: replacements of bias tables, by the table's name; by default the tables stay.

    Returns:
        The present buffers, by output name.
    """
    presents: dict[str, ir.Value] = {}
    for node in filter(is_attention, nodes):
        layer = node.attributes.get_int(KV_LAYER, layer_of(node))
        keys = [(layer, kind) for kind in ("key", "value")]
        buffers = [presents.get(names.present(*key), past[key]) for key in keys]
        *tokens, sinks, table = attention_inputs(node)
        bias = table if table is None or biases is None else biases[str(table.name)]
        inputs = [*tokens, *buffers, *positions, sinks, bias]
        node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        if KV_LAYER in node.attributes:
            continue
        node.resize_outputs(3)
        for kind, value, buffer in zip(("key", "value"), node.outputs[1:], buffers, strict=True):
            value.name, value.type, value.shape = f"{node.name}.{kind}", buffer.type, buffer.shape
            presents[names.present(layer, kind)] = value
    return presents


def past_buffers(
    layers: Iterable[int], kv_shapes: Sequence[tuple[int, int]], batch: int | str, capacity: int | str
) -> dict[tuple[int, str], ir.Value]:
    """Inputs for the K/V buffers of `layers`, float32 [batch, kv_heads, capacity, head_dim], by layer and kind."""
    return {
        (layer, kind): typed_value(names.past(layer, kind), FLOAT, [batch, kv_heads, capacity, head_dim])
        for layer in layers
        for kv_heads, head_dim in [kv_shapes[layer]]
        for kind in ("key", "value")
    }
