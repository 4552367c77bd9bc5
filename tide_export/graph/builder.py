"""Assembles pieces and single operators into a graph, or a branch of one.

A `GraphBuilder` collects the nodes of one scope (the main graph, one branch of an `If`, or a function's body) under a
name prefix. All builders of a model share one `Weights` pool, which becomes the initializers of the main graph, so that
a weight used in two branches is stored once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from tide_export.graph.rewriting import OutputType, dims, initializer, new_node
from tide_export.names.operators import DOMAIN

OPSET = 23  # of traces and ONNX Runtime's graphs: at others, the exporter does not recognise hand-written norms
IR_VERSION = 10  # the first that has opset 23

Dim = int | str | ir.SymbolicDim | None


class Weights:
    """The initializers of the main graph, by name."""

    def __init__(self) -> None:
        self.values: dict[str, ir.Value] = {}

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """The initializer `name`; adds `array` under that name the first time."""
        if name not in self.values:
            self.values[name] = initializer(ir.tensor(array, name=name))
        return self.values[name]

    def integers(self, name: str, numbers: ArrayLike) -> ir.Value:
        """Returns the initializer `name` of int64 numbers."""
        return self.constant(name, np.array(numbers, dtype=np.int64))

    def float32(self, name: str, array: np.ndarray) -> ir.Value:
        """Returns the initializer `name` converted to float32."""
        return self.constant(name, np.ascontiguousarray(array, dtype=np.float32))

    def share(self, weight: ir.Value) -> ir.Value:
        """The pool's value for a piece's initializer; pieces of one trace use one name for one tensor."""
        name = str(weight.name)
        if name not in self.values:
            self.values[name] = ir.Value(
                name=name, shape=weight.shape, type=weight.type, const_value=weight.const_value
            )
        return self.values[name]


class GraphBuilder:
    """The nodes of one scope, in order."""

    def __init__(self, prefix: str, weights: Weights):
        self.prefix = prefix
        self.weights = weights
        self.nodes: list[ir.Node] = []

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping | None = None,
        *,
        domain: str = "",
        dtype: ir.DataType | None = None,
        shape: Iterable[Any] | None = None,
    ) -> ir.Value:
        """Adds a node with one output and returns the output."""
        (value,) = self.ops(op_type, inputs, attributes, domain=domain, types=[(dtype, shape)])
        return value

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping | None = None,
        *,
        domain: str = "",
        types: Sequence[OutputType],
    ) -> list[ir.Value]:
        """Adds a node with one output per (dtype, shape) of `types` and returns them."""
        node = new_node(op_type, inputs, attributes, name="", domain=domain, outputs=types)
        self._add(node)
        return list(node.outputs)

    def copy(self, value: ir.Value) -> ir.Value:
        """An Identity of `value`: a branch may not output an outer value, nor a graph one value twice.

        Into the same buffer it copies nothing.
        """
        return self.op("Identity", [value], dtype=value.dtype, shape=value.shape)

    def inline(self, piece: ir.Graph, inputs: Sequence[ir.Value], batch: Dim, tokens: Dim) -> list[ir.Value]:
        """Adds a copy of `piece` applied to `inputs` and returns its outputs.

        The piece's symbolic batch and token dimensions are renamed to `batch` and `tokens`. Others become anonymous:
        one name for two different lengths would let ONNX Runtime reuse a buffer that is too small.
        """
        symbols = zip(dims(piece.inputs[0]), (batch, tokens), strict=False)
        renamed = {str(dim.value): to for dim, to in symbols if isinstance(dim, ir.SymbolicDim) and dim.value}
        clone = piece.clone()
        for parameter, value in zip(clone.inputs, inputs, strict=True):
            parameter.replace_all_uses_with(value, replace_graph_outputs=True)  # of a piece that computes nothing
        for weight in list(clone.initializers.values()):
            weight.replace_all_uses_with(self.weights.share(weight))
        outputs = list(clone.outputs)
        clone.outputs.clear()
        nodes = list(clone)
        clone.remove(nodes)
        for node in nodes:
            for value in node.outputs:
                if value.shape is not None:
                    value.shape = ir.Shape(
                        [dim if isinstance(dim, int) else renamed.get(str(dim.value)) for dim in value.shape]
                    )
            self._add(node)
        return outputs

    def graph(self, outputs: Sequence[ir.Value]) -> ir.Graph:
        """The builder as a branch, which has no inputs and reads outer values by name."""
        return ir.Graph([], outputs, nodes=self.nodes, name=self.prefix)

    def model(
        self,
        name: str,
        inputs: Sequence[ir.Value],
        outputs: Mapping[str, ir.Value],
        functions: Sequence[ir.Function] = (),
        opset: int = OPSET,
        ir_version: int = IR_VERSION,
    ) -> ir.Model:
        """The builder as a model whose outputs get the names in `outputs`."""
        values = []
        for output, value in outputs.items():
            if value.producer() is None or value.name in outputs:  # a constant, or already an output
                value = self.copy(value)
            value.name = output
            values.append(value)
        graph = ir.Graph(
            inputs,
            values,
            nodes=self.nodes,
            initializers=list(self.weights.values.values()),
            opset_imports={"": opset, DOMAIN: 1, "com.microsoft": 1},
            name=name,
        )
        return ir.Model(graph, ir_version=ir_version, producer_name="tide_export", functions=functions)

    def function(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        outputs: Mapping[str, ir.Value],
        opset: int,
        attributes: Sequence[ir.Attr] = (),
    ) -> ir.Function:
        """Returns the nodes as the model-local function `tide::op_type`.

        Its outputs get the names in `outputs`.

        The nodes must have no types: those of any caller fit.
        """
        for name, value in outputs.items():
            value.name = name
        body = ir.Graph(inputs, list(outputs.values()), nodes=self.nodes, opset_imports={"": opset}, name=op_type)
        return ir.Function(DOMAIN, op_type, graph=body, attributes=attributes)

    def _add(self, node: ir.Node) -> None:
        node.name = f"{self.prefix}/{node.op_type}_{len(self.nodes)}"
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}" if len(node.outputs) > 1 else node.name
        self.nodes.append(node)
