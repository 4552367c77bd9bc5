"""Connects the linear layers that low-rank adapters may change to the adapters' weights.

A row of the weights is an adapter: for each target in turn 1 if it is changed or 0, down [K, rank], and up [rank, N].
Row 0 is zeros, for sequences without one.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tide_export.bundle.model_info import LoraInfo, LoraTarget
from tide_export.graph.builder import Dim
from tide_export.graph.rewriting import FLOAT, INT64, required, static_dim, typed_value
from tide_export.names import paged
from tide_export.names.operators import DOMAIN, OP_LORA


def is_lora(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == OP_LORA


def lora_of(nodes: Sequence[ir.Node]) -> LoraInfo | None:
    """Returns the room for adapters in the traced `nodes`, targets by layer; None if they have none."""
    targets: dict[str, LoraTarget] = {}
    rank = 0
    for node in filter(is_lora, nodes):
        y, x = map(required, node.inputs)
        name, layers = node.attributes["target"].as_string(), tuple(node.attributes["layers"].as_ints())
        rank = node.attributes["rank"].as_int()
        targets[name] = LoraTarget(name, layers, static_dim(x, -1), static_dim(y, -1))
    ordered = sorted(targets.values(), key=lambda target: target.layers)
    return LoraInfo(rank, tuple(ordered)) if ordered else None


def lora_inputs(info: LoraInfo | None, sequences: Dim) -> list[ir.Value]:
    """Returns the inputs of all adapters' weights and of each sequence's row in them; none without room."""
    if info is None:
        return []
    weights = typed_value(paged.LORA_WEIGHTS, FLOAT, ["adapters", info.size])
    return [weights, typed_value(paged.ADAPTERS, INT64, [sequences])]


def read_adapters(nodes: Sequence[ir.Node], info: LoraInfo | None, inputs: Sequence[ir.Value | None]) -> bool:
    """Makes every TideLora among `nodes` read the weights of its target; returns whether there is one.

    Args:
        inputs: those of `lora_inputs`, and, of several sequences, where each one's tokens start [R + 1].
    """
    found = False
    for node in filter(is_lora, nodes):
        assert info is not None
        target, offset = node.attributes["target"].as_string(), 1
        for one in info.targets:
            if one.name == target:
                break
            offset += info.rank * (one.inputs + one.outputs) + 1
        read = [*node.inputs, *inputs]
        node.resize_inputs(len(read))
        for index, value in enumerate(read):
            node.replace_input_with(index, value)
        node.attributes.clear()
        settings = {"offset": offset, "rank": info.rank, "column": 0, "width": static_dim(node.outputs[0], -1)}
        node.attributes.update({name: ir.AttrInt64(name, number) for name, number in settings.items()})
        found = True
    return found
