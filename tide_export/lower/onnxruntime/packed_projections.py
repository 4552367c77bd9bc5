"""Query, key and value projections of one input become one MatMul whose result GroupQueryAttention takes whole.

Applies where all three are MatMul (+ bias) of the same states by stored weights with nothing in between; a model that
normalizes queries and keys per head keeps its three. The packed weight is assembled when the model is written.

Quantized products are packed by naming all their matrices in one node, whose rows `QuantizedProductsPass` puts below
each other: every row has its own blocks, so nothing is rounded anew.

Precondition: `GroupQueryAttentionPass` ran. Postcondition: such a GroupQueryAttention has no key and value input.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tide_export.lower.rewriting import add_before, derived_weight, drop_unused, is_weight, last_dim, nodes_of, producer
from tide_export.names import DOMAIN, OP_QUANTIZED_MATMUL


@dataclass
class _Projection:
    states: ir.Value
    weight: ir.Value | None  # [D, N]; None: quantized
    bias: ir.Value | None  # [N]
    nodes: list[ir.Node]  # readers first

    @property
    def names(self) -> tuple[str, ...]:
        """Of the quantized matrices it multiplies by."""
        return () if self.weight is not None else tuple(self.nodes[-1].attributes["weights"].as_strings())


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
    quantized = producer(value, OP_QUANTIZED_MATMUL, DOMAIN)
    if quantized is not None:
        states, *rest = quantized.inputs
        assert states is not None
        alone = len(quantized.outputs[0].uses()) == 1
        return _Projection(states, None, rest[0] if rest else None, [quantized]) if alone else None
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
    return all(
        p.states is first.states
        and (p.bias is None) == (first.bias is None)
        and (p.weight is None) == (first.weight is None)
        for p in projections
    )


def _pack(model: ir.Model, attention: ir.Node, projections: list[_Projection]) -> None:
    first = projections[0]
    dtype = first.states.dtype or ir.DataType.FLOAT
    width = sum(last_dim(p.nodes[0].outputs[0]) or 0 for p in projections)
    tokens = list(first.states.shape)[:2] if first.states.shape is not None else [1, None]
    kinds = [(dtype, [*tokens, width])]
    bias = None
    if first.bias is not None:
        biases = [p.bias for p in projections if p.bias is not None]
        bias = derived_weight(model, f"{first.bias.name}.qkv", [width], dtype, _concatenated(biases))
    if first.weight is None:
        names = [name for projection in projections for name in projection.names]
        inputs = [first.states] if bias is None else [first.states, bias]
        packed = add_before(
            attention, OP_QUANTIZED_MATMUL, inputs, {"weights": names}, domain=DOMAIN, outputs=kinds, suffix="_qkv"
        ).outputs[0]
    else:
        weights = [p.weight for p in projections if p.weight is not None]
        shape = [last_dim(first.states) or 0, width]
        weight = derived_weight(model, f"{first.weight.name}.qkv", shape, dtype, _concatenated(weights))
        packed = add_before(attention, "MatMul", [first.states, weight], outputs=kinds, suffix="_qkv").outputs[0]
        if bias is not None:
            packed = add_before(attention, "Add", [packed, bias], outputs=kinds, suffix="_qkv_bias").outputs[0]
    attention.replace_input_with(0, packed)
    attention.replace_input_with(1, None)
    attention.replace_input_with(2, None)
    for projection in projections:
        drop_unused(projection.nodes)


def _concatenated(values: list[ir.Value]):
    tensors = [value.const_value for value in values]
    return lambda: np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None], axis=-1)
