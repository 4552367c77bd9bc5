"""Packs the query, key and value projections of one input into one MatMul.

The attention reads its result whole.

Applies where all three are MatMul (+ bias) of the same hidden states by stored weights with nothing in between; a model
that normalizes queries and keys per head keeps its three. The packed weight is concatenated when the model is written.

Quantized matmuls are packed by naming all their matrices in one node, whose rows `QuantizedMatMulsPass` stacks: every
row consists of whole blocks, so nothing is rounded again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    FLOAT,
    derived_weight,
    drop_unused,
    ensure_none_left,
    is_weight,
    last_dim,
    nodes_of,
    op_before,
    producer,
    required,
)
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_LORA, OP_PAGED_ATTENTION, OP_QUANTIZED_MATMUL


@dataclass
class _Projection:
    hidden: ir.Value
    weight: ir.Value | None  # [D, N]; None: quantized
    bias: ir.Value | None  # [N]
    nodes: list[ir.Node]  # readers first
    lora: ir.Node | None = None  # what changes it by an adapter

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the quantized matrices it multiplies by."""
        return () if self.weight is not None else tuple(self.nodes[-1].attributes["weights"].as_strings())

    @property
    def bits(self) -> tuple[int, ...]:
        """Returns the bits of the model's matrices: a GGUF file may have some of 4 and some of 8."""
        bits = self.nodes[-1].attributes.get("bits")
        return () if bits is None else tuple(bits.as_ints())


class PackedProjectionsPass(ir.passes.InPlacePass):
    def requires(self, model: ir.Model) -> None:
        if nodes_of(model.graph, OP_ATTENTION, DOMAIN):
            raise ir.passes.PreconditionError("projections are packed after attention is lowered")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for attention, projections in _packable(model):
            _pack(model.graph, attention, projections)
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(attention for attention, _ in _packable(model))


def _packable(model: ir.Model) -> Iterator[tuple[ir.Node, list[_Projection]]]:
    """Every attention whose three projections can be packed, with these."""
    paged = [node for name in OP_PAGED_ATTENTION.values() for node in nodes_of(model.graph, name, DOMAIN)]
    for node in [*paged, *nodes_of(model.graph, "GroupQueryAttention", "com.microsoft")]:
        projections = [p for value in node.inputs[:3] if (p := _projection(value)) is not None]
        kinds = {(p.hidden, p.bias is None, p.weight is None, p.bits) for p in projections}
        if len(projections) == 3 and len(kinds) == 1:
            yield node, projections


def _projection(value: ir.Value | None) -> _Projection | None:
    """Returns the product that `value` is, with the adapter that changes it.

    None if it is none that can be packed.
    """
    lora = producer(value, OP_LORA, DOMAIN)
    projection = _plain_projection(value if lora is None else lora.inputs[0])
    if projection is None or lora is None:
        return projection
    return replace(projection, lora=lora) if len(lora.outputs[0].uses()) == 1 else None


def _plain_projection(value: ir.Value | None) -> _Projection | None:
    quantized = producer(value, OP_QUANTIZED_MATMUL, DOMAIN)
    if quantized is not None:
        hidden, bias = (*quantized.inputs, None)[:2]
        alone = len(quantized.outputs[0].uses()) == 1
        return _Projection(required(hidden), None, bias, [quantized]) if alone else None
    bias, nodes = None, list[ir.Node]()
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
    hidden, weight = map(required, matmul.inputs)
    nodes.append(matmul)
    if any(len(item.outputs[0].uses()) != 1 for item in nodes):
        return None
    return _Projection(hidden, weight, bias, nodes)


def _pack(graph: ir.Graph, attention: ir.Node, projections: list[_Projection]) -> None:
    first = projections[0]
    dtype = first.hidden.dtype or FLOAT
    width = sum(last_dim(p.nodes[0].outputs[0]) or 0 for p in projections)
    shape = [*(list(first.hidden.shape)[:2] if first.hidden.shape is not None else [1, None]), width]
    bias = None
    if first.bias is not None:
        bias = derived_weight(
            graph, f"{first.bias.name}.qkv", [width], dtype, _concatenated(p.bias for p in projections)
        )
    if first.weight is None:
        inputs, names = [first.hidden, *([bias] if bias is not None else [])], [n for p in projections for n in p.names]
        packed = op_before(
            attention,
            OP_QUANTIZED_MATMUL,
            inputs,
            {"weights": names, "bits": list(first.bits)},
            domain=DOMAIN,
            dtype=dtype,
            shape=shape,
            suffix="_qkv",
        )
    else:
        weights = _concatenated(p.weight for p in projections)
        weight_shape = [last_dim(first.hidden) or 0, width]
        weight = derived_weight(graph, f"{first.weight.name}.qkv", weight_shape, dtype, weights)
        packed = op_before(attention, "MatMul", [first.hidden, weight], dtype=dtype, shape=shape, suffix="_qkv")
        if bias is not None:
            packed = op_before(attention, "Add", [packed, bias], dtype=dtype, shape=shape, suffix="_qkv_bias")
    column = 0
    for projection in projections:
        columns = last_dim(projection.nodes[0].outputs[0]) or 0
        if (lora := projection.lora) is not None:
            changed: list[ir.Value | None] = [packed, *lora.inputs[1:]]
            attributes = {name: attribute.as_int() for name, attribute in lora.attributes.items()} | {"column": column}
            packed = op_before(
                attention,
                OP_LORA,
                changed,
                attributes,
                domain=DOMAIN,
                dtype=dtype,
                shape=shape,
                suffix=f"_lora_{column}",
            )
        column += columns
    for index, value in enumerate((packed, None, None)):
        attention.replace_input_with(index, value)
    for projection in projections:
        drop_unused([projection.lora, *projection.nodes])


def _concatenated(values: Iterable[ir.Value | None]) -> Callable[[], np.ndarray]:
    tensors = [required(value).const_value for value in values]
    return lambda: np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None], axis=-1)
