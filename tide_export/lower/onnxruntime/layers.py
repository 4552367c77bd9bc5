"""Computes layers by one operator of `cpp/ops`.

Its threads meet between its nodes' phases and not between operators.

Each node of a run (`layer_runs` finds them) becomes a line of the operator's attribute `nodes` (`layers_text` writes
it), which `cpp/ops/layers_program.cpp` reads. The nodes themselves are the body of a model-local function, which an
ONNX Runtime inlines where the operator is not registered.
"""

from collections.abc import Iterator, Sequence

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.graph.rewriting import graph_of, new_node, required
from tide_export.lower.onnxruntime.layer_runs import (
    ALL_INTEGER_MATMULS,
    Run,
    branches_of,
    hidden_among,
    read_by,
    runs_of,
)
from tide_export.lower.onnxruntime.layers_text import text_of
from tide_export.names.operators import DOMAIN, OP_INTEGER_LAYERS, OP_LAYERS


class LayersPass(ir.passes.InPlacePass):
    """After all passes that change nodes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in _graphs(model.graph):
            for run in list(runs_of(graph)):
                _replace(model, run, str(sum(key[1] in (OP_LAYERS, OP_INTEGER_LAYERS) for key in model.functions)))
                modified = True
        return ir.passes.PassResult(model, modified=modified)


def inline_layers(model: ir.Model) -> None:
    """Replaces each such operator by the nodes it computes."""
    common_passes.InlinePass(lambda function: function.name in (OP_LAYERS, OP_INTEGER_LAYERS))(model)


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """`graph` and its branches."""
    yield graph
    for node in list(graph):
        for branch in branches_of(node):
            yield from _graphs(branch)


def _replace(model: ir.Model, run: Run, overload: str) -> None:
    own = set(run.nodes)
    inputs = list(dict.fromkeys(value for node in run.nodes for value in read_by(node) if value.producer() not in own))
    first = next(iter(hidden_among(read_by(run.nodes[0]))))
    inputs.sort(key=lambda value: value is not first)
    outputs = [value for node in run.nodes for value in node.outputs if value.name and _is_read_outside(value, own)]
    op_type = OP_INTEGER_LAYERS if any(node.op_type in ALL_INTEGER_MATMULS for node in run.nodes) else OP_LAYERS
    layers = new_node(
        op_type,
        inputs,
        {"nodes": text_of(run.nodes, inputs, outputs)},
        name=f"{run.nodes[0].name}/{op_type}",
        domain=DOMAIN,
        outputs=[(value.dtype, value.shape) for value in outputs],
    )
    layers.overload = overload
    function = _function(model, layers, run.nodes, inputs, outputs)
    model.functions[function.identifier()] = function
    graph = graph_of(run.nodes[-1])
    graph.insert_after(run.nodes[-1], layers)
    last = layers
    for node in run.after:
        graph.remove(node)
        graph.insert_after(last, node)
        last = node
    for old, new in zip(outputs, layers.outputs, strict=True):
        name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}/inlined", name
    graph.remove(run.nodes, safe=False)


def _is_read_outside(value: ir.Value, own: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in own for use in value.uses())


def _function(
    model: ir.Model,
    layers: ir.Node,
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
) -> ir.Function:
    """The function of those nodes, copied."""
    values = {value: ir.Value(name=value.name, type=value.type, shape=value.shape) for value in inputs}
    copies = []
    for node in nodes:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else values[value] for value in node.inputs],
            [attribute for attribute in node.attributes.values() if isinstance(attribute, ir.Attr)],
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=node.name,
            metadata_props=dict(node.metadata_props),
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            values[old] = new
        copies.append(copy)
    imports = model.graph.opset_imports
    body = ir.Graph(
        [values[value] for value in inputs],
        [values[value] for value in outputs],
        nodes=copies,
        opset_imports={domain: imports.get(domain, 1) for domain in sorted({"", *(node.domain for node in nodes)})},
        name=layers.op_type,
    )
    _inline_overloads(model, body)
    attributes = [ir.Attr("nodes", ir.AttributeType.STRING, None)]
    return ir.Function(DOMAIN, layers.op_type, layers.overload, graph=body, attributes=attributes)


def _inline_overloads(model: ir.Model, body: ir.Graph) -> None:
    """Replaces calls of functions with an overload, which ONNX Runtime loses of nodes in a function."""
    called = {node.op_identifier() for node in body if node.overload}
    functions = [model.functions[identifier].clone() for identifier in called]
    if functions:
        common_passes.InlinePass()(ir.Model(body, ir_version=required(model.ir_version), functions=functions))
