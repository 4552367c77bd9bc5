"""Connects the traced attentions of an inlined piece to their K/V cache."""

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from tide_export.compose.cut import attention_inputs, is_attention, number_of
from tide_export.compose.passes.shared_keys import KV_LAYER
from tide_export.graph.rewriting import FLOAT, typed_value
from tide_export.names import paged, segment_networks

KINDS = ("key", "value")
Cache = dict[tuple[int, str], ir.Value]  # by layer and kind


def attend_from_cache(nodes: Sequence[ir.Node], cache: Cache, positions: Sequence[ir.Value | None]) -> Cache:
    """Makes every TideAttention among `nodes` read and write the K/V cache.

    The cache is buffers or pages; returns the written values.

    Its inputs become query, key, value, cached keys, cached values, `positions`, sinks and bias (which may be absent),
    and the bias by distance if there is one; its outputs the attention's result, and keys and values with the new ones.
    One that shares an earlier layer's keys and values has none of its own: its inputs are that layer's, the new tokens
    in them, its output the result.

    Args:
        cache: of layers in other segments as it is after those have run.
        positions: the inputs by which the target places the new tokens.
    """
    written: Cache = {}
    for node in filter(is_attention, nodes):
        layer = node.attributes.get_int(KV_LAYER, number_of(node))
        cached = [written.get((layer, kind), cache[layer, kind]) for kind in KINDS]
        query, key, value, sinks, bias, distance_bias = attention_inputs(node)
        inputs = [query, key, value, *cached, *positions, sinks, bias]
        if distance_bias is not None:
            inputs.append(distance_bias)
        node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        if KV_LAYER in node.attributes:
            continue
        node.resize_outputs(3)
        for kind, value, before in zip(KINDS, node.outputs[1:], cached, strict=True):
            value.name, value.type, value.shape = f"{node.name}.{kind}", before.type, before.shape
            written[layer, kind] = value
    return written


def past_buffers(layers: Iterable[int], kv_shapes: Sequence[tuple[int, int]], batch: str, capacity: int) -> Cache:
    """Inputs for the K/V buffers of `layers`, float32 [batch, kv_heads, capacity, head_dim]."""
    return {
        (layer, kind): typed_value(segment_networks.past(layer, kind), FLOAT, [batch, kv_heads, capacity, head_dim])
        for layer in layers
        for kv_heads, head_dim in [kv_shapes[layer]]
        for kind in KINDS
    }


def page_inputs(layers: Iterable[int], kv_shapes: Sequence[tuple[int, int]] | Mapping[int, tuple[int, int]]) -> Cache:
    """Inputs for the K/V pages of `layers`, float32 [pages, kv_heads, page_tokens, head_dim]."""
    return {
        (layer, kind): typed_value(paged.pages(layer, kind), FLOAT, ["pages", kv_heads, "page_tokens", head_dim])
        for layer in layers
        for kv_heads, head_dim in [kv_shapes[layer]]
        for kind in KINDS
    }


def present_outputs(written: Mapping[tuple[int, str], ir.Value]) -> dict[str, ir.Value]:
    """Returns written K/V buffers by the names of the outputs."""
    return {segment_networks.present(*key): value for key, value in written.items()}


def page_outputs(written: Mapping[tuple[int, str], ir.Value]) -> dict[str, ir.Value]:
    """Returns written K/V pages by the names of the outputs."""
    return {paged.new_pages(*key): value for key, value in written.items()}
