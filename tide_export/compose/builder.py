"""Puts pieces and single ops together into a graph or a branch of one; what `compose` writes with.

A `Block` collects the nodes of one scope (the main graph, or one branch of an `If`) under a name prefix; all blocks of
a model draw their weights from one `Weights` pool that lives in the main graph, so a weight used in two branches is
stored once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Dim = int | str | None


class Weights:
    """The initializers of the main graph, by name."""

    def __init__(self) -> None:
        self.values: dict[str, ir.Value] = {}

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """The initializer `name`, made from `array` the first time it is asked for."""
        if name not in self.values:
            self.values[name] = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                const_value=ir.tensor(array, name=name),
            )
        return self.values[name]

    def share(self, initializer: ir.Value) -> ir.Value:
        """The pool's own value for a piece's initializer; pieces of one trace use one name for one tensor."""
        name = initializer.name
        assert name is not None
        if name not in self.values:
            self.values[name] = ir.Value(
                name=name, shape=initializer.shape, type=initializer.type, const_value=initializer.const_value
            )
        return self.values[name]


class Block:
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
        """Adds a node with one output and gives the output."""
        (value,) = self.ops(op_type, inputs, attributes, domain=domain, types=[(dtype, shape)])
        return value

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping | None = None,
        *,
        domain: str = "",
        types: Sequence[tuple[ir.DataType | None, Iterable[Any] | None]],
    ) -> list[ir.Value]:
        """Adds a node with one output per (dtype, shape) of `types` and gives them."""
        node = ir.node(op_type, inputs, attributes=attributes or {}, domain=domain, num_outputs=len(types))
        for value, (dtype, shape) in zip(node.outputs, types, strict=True):
            value.type = ir.TensorType(dtype) if dtype is not None else None
            value.shape = ir.Shape(shape) if shape is not None else None
        self._add(node)
        return list(node.outputs)

    def inline(self, piece: ir.Graph, inputs: Sequence[ir.Value], dims: Mapping[str, Dim]) -> list[ir.Value]:
        """Adds a copy of `piece` fed by `inputs` and gives its outputs.

        `dims` renames the piece's symbolic dimensions. Others become anonymous: one name for two different lengths
        would let ONNX Runtime reuse a buffer that is too small.
        """
        copy = piece.clone()
        for parameter, value in zip(copy.inputs, inputs, strict=True):
            parameter.replace_all_uses_with(value)
        for initializer in list(copy.initializers.values()):
            initializer.replace_all_uses_with(self.weights.share(initializer))
        outputs = list(copy.outputs)
        copy.outputs.clear()
        nodes = list(copy)
        copy.remove(nodes)
        for node in nodes:
            for value in node.outputs:
                if value.shape is not None:
                    value.shape = ir.Shape([_rename(dim, dims) for dim in value.shape])
            self._add(node)
        return outputs

    def graph(self, outputs: Sequence[ir.Value]) -> ir.Graph:
        """The block as a branch: no inputs of its own, everything outer is seen by name."""
        return ir.Graph([], outputs, nodes=self.nodes, name=self.prefix)

    def _add(self, node: ir.Node) -> None:
        self._name(node, len(self.nodes))
        self.nodes.append(node)

    def _name(self, node: ir.Node, number: int) -> None:
        node.name = f"{self.prefix}/{node.op_type}_{number}"
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}" if len(node.outputs) > 1 else node.name


def _rename(dim: int | ir.SymbolicDim, dims: Mapping[str, Dim]) -> Dim:
    if isinstance(dim, int):
        return dim
    return dims.get(dim.value) if dim.value is not None else None
