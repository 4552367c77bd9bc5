"""Computes an MLP's SiLU(x G) * (x U) by one operator of `cpp/ops` that multiplies by both matrices.

It takes the place of two matmuls, the activation and a product, each with a start of its own: x is prepared once, and
threads meet once. Both matrices are stored as one, the rows of the gate first. The operators are model-local functions
too, of the matmul without a gate and standard operators, which ONNX Runtime inlines where it lacks them.

Where adapters may change what is between, it is one matmul by both matrices, the changes, and TideGate. So it is where
the model has both matrices as one, as experts have.

Sound where nothing else reads what is between; after the passes that choose the matmuls' operators.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx.parser
import onnx_ir as ir

from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import (
    derived_weight,
    dims,
    drop_unused,
    ensure_none_left,
    last_dim,
    nodes_of,
    op_before,
    producer,
    rank,
    replace_value,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_GATE, OP_GATED_MATMUL, OP_LORA, WEIGHTS_METADATA

_WEIGHTS = slice(1, 3)  # inputs of a matmul that have a row for each of its outputs; after them: outliers


@dataclass
class _Mlp:
    gate: ir.Node
    up: ir.Node
    loras: tuple[ir.Node | None, ir.Node | None]  # what changes gate and up by an adapter
    activation: list[ir.Node]  # readers first; the last one computes SiLU(gate) * up

    @property
    def product(self) -> ir.Node:
        return self.activation[0]


class GatedMatMulsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for mlp in _gated(model):
            plain = model.functions[(DOMAIN, mlp.gate.op_type, "")]
            changed = any(mlp.loras)
            function = gate_function(OPSET) if changed else gated_matmul_function(plain, OPSET)
            model.functions[function.identifier()] = function
            _replace(model.graph, mlp)
            modified = True
        for product, both in list(_halved(model)):
            function = gate_function(OPSET)
            model.functions[function.identifier()] = function
            old = product.outputs[0]
            result = op_before(product, OP_GATE, [both], domain=DOMAIN, dtype=old.dtype, shape=old.shape)
            replace_value(old, result)
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(mlp.product for mlp in _gated(model))


def gated_matmul_function(matmul: ir.Function, opset: int) -> ir.Function:
    """The operator with a gate, of the same inputs and attributes as that function of one without."""
    name = OP_GATED_MATMUL[matmul.name]
    inputs = [ir.Value(name=value.name) for value in matmul.inputs]
    references = [ir.RefAttr(each, each, attribute.type) for each, attribute in matmul.attributes.items()]
    both = ir.Node(DOMAIN, matmul.name, inputs, references)
    halves = ir.Node(
        "", "Split", both.outputs, [ir.AttrInt64("axis", -1), ir.AttrInt64("num_outputs", 2)], num_outputs=2
    )
    gate, up = halves.outputs
    sigmoid = ir.Node("", "Sigmoid", [gate])
    activated = ir.Node("", "Mul", [gate, sigmoid.outputs[0]])
    product = ir.Node("", "Mul", [activated.outputs[0], up])
    nodes = [both, halves, sigmoid, activated, product]
    for node, result in zip(nodes, ("both", "halves", "sigmoid", "activated", "y"), strict=True):
        node.name = result
        for index, output in enumerate(node.outputs):
            output.name = result if len(node.outputs) == 1 else f"{result}.{index}"
    body = ir.Graph(inputs, product.outputs, nodes=nodes, opset_imports={"": opset, DOMAIN: 1}, name=name)
    attributes = [ir.Attr(each, attribute.type, None) for each, attribute in matmul.attributes.items()]
    return ir.Function(DOMAIN, name, graph=body, attributes=attributes)


def gate_function(opset: int) -> ir.Function:
    """Defines `TideGate`: x [.., 2 W] -> SiLU of its first half times the second, [.., W]."""
    text = f"""<opset_import: ["" : {opset}], domain: "{DOMAIN}">
        {OP_GATE} (x) => (y) {{
            gates, ups = Split <axis = -1, num_outputs = 2> (x)
            sigmoid = Sigmoid (gates)  activated = Mul (gates, sigmoid)  y = Mul (activated, ups)
        }}"""
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def _gated(model: ir.Model) -> Iterator[_Mlp]:
    """Yields every Mul of x * Sigmoid(x) by another matmul of the same input, of the same kind and size."""
    for product in nodes_of(model.graph, "Mul"):
        for activated, other in (product.inputs, product.inputs[::-1]):
            silu, (up, up_lora) = producer(activated, "Mul"), _matmul(other)
            if silu is None or up is None or _readers(silu) != 1:
                continue
            for value, sigmoid_of in (silu.inputs, silu.inputs[::-1]):
                sigmoid, (gate, gate_lora) = producer(sigmoid_of, "Sigmoid"), _matmul(value)
                if sigmoid is None or gate is None or sigmoid.inputs[0] is not value:
                    continue
                read = _readers(gate_lora or gate), _readers(sigmoid), _readers(up_lora or up)
                if read == (2, 1, 1) and gate is not up and _kind(gate) == _kind(up):
                    yield _Mlp(gate, up, (gate_lora, up_lora), [product, silu, sigmoid])
                    break


def _halved(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yields every Mul of SiLU of an operator's first half by its second half, with both halves."""
    for product in nodes_of(model.graph, "Mul"):
        for activated, up in (product.inputs, product.inputs[::-1]):
            silu, split = producer(activated, "Mul"), producer(up, "Split")
            if silu is None or split is None or len(split.outputs) != 2 or split.outputs[1] is not up:
                continue
            gate, both = split.outputs[0], required(split.inputs[0])
            sigmoids = [producer(value, "Sigmoid") for value in silu.inputs if value is not gate]
            halves = {last_dim(value) for value in split.outputs}
            of_operator = (maker := both.producer()) is not None and maker.domain == DOMAIN
            last = split.attributes.get_int("axis", 0) in (-1, (rank(both) or 0) - 1)
            whole = len(sigmoids) == 1 and sigmoids[0] is not None and sigmoids[0].inputs[0] is gate
            if whole and last and of_operator and len(halves) == 1 and None not in halves:
                yield product, both
                break


def _matmul(value: ir.Value | None) -> tuple[ir.Node | None, ir.Node | None]:
    """Returns the matmul that gives `value`, and the TideLora between the two; None where there is none."""
    lora = producer(value, OP_LORA, DOMAIN)
    if lora is not None:
        value = lora.inputs[0]
    node = value.producer() if value is not None else None
    if node is None or node.domain != DOMAIN or node.op_type not in OP_GATED_MATMUL:
        return None, None
    return (node, lora) if lora is None or _readers(node) == 1 else (None, None)


def _readers(node: ir.Node) -> int:
    return len(node.outputs[0].uses()) + node.outputs[0].is_graph_output()


def _kind(matmul: ir.Node) -> tuple[object, ...]:
    """Returns what two matmuls must have in common to be one."""
    attributes = sorted((name, attribute.value) for name, attribute in matmul.attributes.items())
    outliers = [required(required(value).const_value).numpy().tobytes() for value in matmul.inputs[_WEIGHTS.stop :]]
    return matmul.op_type, matmul.inputs[0], matmul.graph, last_dim(matmul.outputs[0]), attributes, outliers


def _replace(graph: ir.Graph, mlp: _Mlp) -> None:
    weights = [
        _stacked(graph, map(required, pair))
        for pair in zip(mlp.gate.inputs[_WEIGHTS], mlp.up.inputs[_WEIGHTS], strict=True)
    ]
    attributes = {name: attribute.value for name, attribute in mlp.gate.attributes.items()}
    if "N" in attributes:
        attributes["N"] *= 2
    inputs, old = [mlp.gate.inputs[0], *weights, *mlp.gate.inputs[_WEIGHTS.stop :]], mlp.product.outputs[0]
    changed = any(mlp.loras)
    op = mlp.gate.op_type if changed else OP_GATED_MATMUL[mlp.gate.op_type]
    shape = [*dims(old)[:-1], static_dim(old, -1) * (2 if changed else 1)]
    result = op_before(mlp.product, op, inputs, attributes, domain=DOMAIN, dtype=old.dtype, shape=shape)
    names = [
        matmul.metadata_props[WEIGHTS_METADATA]
        for matmul in (mlp.gate, mlp.up)
        if WEIGHTS_METADATA in matmul.metadata_props
    ]
    if names:
        required(result.producer()).metadata_props[WEIGHTS_METADATA] = "\n".join(names)
    if any(mlp.loras):
        result = _changed(mlp, result)
    replace_value(old, result)
    drop_unused([*mlp.activation, *mlp.loras, mlp.gate, mlp.up])


def _changed(mlp: _Mlp, both: ir.Value) -> ir.Value:
    """Returns the gated product of `both` halves, changed by adapters."""
    old, shape = mlp.product.outputs[0], both.shape
    for column, lora in zip((0, static_dim(old, -1)), mlp.loras, strict=True):
        if lora is None:
            continue
        attributes = {name: attribute.as_int() for name, attribute in lora.attributes.items()} | {"column": column}
        inputs: list[ir.Value | None] = [both, *lora.inputs[1:]]
        suffix = f"_lora_{column}"
        both = op_before(
            mlp.product, OP_LORA, inputs, attributes, domain=DOMAIN, dtype=old.dtype, shape=shape, suffix=suffix
        )
    return op_before(mlp.product, OP_GATE, [both], domain=DOMAIN, dtype=old.dtype, shape=old.shape, suffix="_gate")


def _stacked(graph: ir.Graph, weights: Iterable[ir.Value]) -> ir.Value:
    """The rows of the weights, one after the other."""
    values = list(weights)
    tensors = [required(value.const_value) for value in values]
    shape = [sum(static_dim(value, 0) for value in values), *tensors[0].shape.numpy()[1:]]
    name = "+".join(str(value.name) for value in values)
    return derived_weight(
        graph, name, shape, tensors[0].dtype, lambda: np.concatenate([tensor.numpy() for tensor in tensors])
    )
