"""Query, key and value projections of one input become one MatMul whose result GroupQueryAttention takes whole.

Applies where all three are MatMul (+ bias) of the same states by stored weights with nothing in between; a model that
normalizes queries and keys per head keeps its three. The packed weight is assembled when the model is written.

Precondition: `GroupQueryAttentionPass` ran. Postcondition: such a GroupQueryAttention has no key and value input.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tide_export.lower.passes._common import (
    add_before,
    derived_weight,
    drop_unused,
    is_weight,
    last_dim,
    nodes_of,
    producer,
)


@dataclass
class _Projection:
    states: ir.Value
    weight: ir.Value  # [D, N]
    bias: ir.Value | None  # [N]
    nodes: list[ir.Node]  # readers first


class PackedProjectionsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in nodes_of(model, "GroupQueryAttention", "com.microsoft"):
            found = [_projection(value) for value in node.inputs[:3]]
            projections = [projection for projection in found if projection is not None]
            if len(projections) != 3 or not _packable(projections):
                continue
            _pack(model, node, projections)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _projection(value: ir.Value | None) -> _Projection | None:
    bias, nodes = None, []
    add = producer(value, "Add")
    if add is not None:
        bias = next((item for item in add.inputs if is_weight(item, 1)), None)
        value = next((item for item in add.inputs if item is not bias), None)
        if bias is None:
            return None
        nodes.append(add)
    matmul = producer(value, "MatMul")
    if matmul is None or not is_weight(matmul.inputs[1], 2):
        return None
    states, weight = matmul.inputs
    assert states is not None
    assert weight is not None
    nodes.append(matmul)
    if any(len(item.outputs[0].uses()) != 1 for item in nodes):
        return None
    return _Projection(states, weight, bias, nodes)


def _packable(projections: list[_Projection]) -> bool:
    first = projections[0]
    return all(p.states is first.states and (p.bias is None) == (first.bias is None) for p in projections)


def _pack(model: ir.Model, attention: ir.Node, projections: list[_Projection]) -> None:
    first = projections[0]
    dtype = first.weight.dtype or ir.DataType.FLOAT
    width = sum(last_dim(p.weight) or 0 for p in projections)
    weight = derived_weight(
        model,
        f"{first.weight.name}.qkv",
        [last_dim(first.states) or 0, width],
        dtype,
        _concatenated([p.weight for p in projections]),
    )
    tokens = list(first.states.shape)[:2] if first.states.shape is not None else [1, None]
    kinds = [(dtype, [*tokens, width])]
    packed = add_before(attention, "MatMul", [first.states, weight], outputs=kinds, suffix="_qkv").outputs[0]
    if first.bias is not None:
        biases = [p.bias for p in projections if p.bias is not None]
        bias = derived_weight(model, f"{first.bias.name}.qkv", [width], dtype, _concatenated(biases))
        packed = add_before(attention, "Add", [packed, bias], outputs=kinds, suffix="_qkv_bias").outputs[0]
    attention.replace_input_with(0, packed)
    attention.replace_input_with(1, None)
    attention.replace_input_with(2, None)
    for projection in projections:
        drop_unused(projection.nodes)


def _concatenated(values: list[ir.Value]):
    tensors = [value.const_value for value in values]
    return lambda: np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None], axis=-1)
