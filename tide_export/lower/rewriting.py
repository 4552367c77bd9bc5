"""What the passes share: looking at producers, adding nodes and weights where they belong."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node behind `value` if it is an `op_type`."""
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == (domain, op_type) else None


def nodes_of(model: ir.Model, op_type: str, domain: str = "") -> list[ir.Node]:
    """All nodes of a type, branches included, listed up front so that the graph may change meanwhile."""
    return [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == (domain, op_type)]


def last_dim(value: ir.Value | None) -> int | None:
    """The size of the last dimension, if known."""
    if value is None or value.shape is None or not len(value.shape):
        return None
    return value.shape[-1] if isinstance(value.shape[-1], int) else None


def is_weight(value: ir.Value | None, rank: int) -> bool:
    """Whether `value` is an initializer of that rank."""
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) == rank


def add_before(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping | None = None,
    *,
    domain: str = "",
    outputs: Sequence[tuple[ir.DataType | None, Iterable | None]] = ((None, None),),
    suffix: str = "",
) -> ir.Node:
    """A new node in front of `node`, in its graph, named after it."""
    new = ir.node(op_type, inputs, attributes=attributes or {}, domain=domain, num_outputs=len(outputs))
    new.name = f"{node.name}/{op_type}{suffix}"
    for index, (value, (dtype, shape)) in enumerate(zip(new.outputs, outputs, strict=True)):
        value.name = f"{new.name}.{index}"
        value.type = ir.TensorType(dtype) if dtype is not None else None
        value.shape = ir.Shape(shape) if shape is not None else None
    assert node.graph is not None
    node.graph.insert_before(node, new)
    return new


def constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """The initializer `name` of the main graph, made from `array` the first time."""
    found = model.graph.initializers.get(name)
    return found if found is not None else _register(model, name, ir.tensor(array, name=name))


def derived_weight(
    model: ir.Model, name: str, shape: Sequence[int], dtype: ir.DataType, make: Callable[[], np.ndarray]
) -> ir.Value:
    """A weight computed from others only when the model is written, so that no second copy of a model is ever held."""
    found = model.graph.initializers.get(name)
    if found is not None:
        return found
    tensor = ir.LazyTensor(lambda: ir.tensor(make(), name=name), dtype=dtype, shape=ir.Shape(shape), name=name)
    return _register(model, name, tensor)


def _register(model: ir.Model, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def drop_unused(nodes: Sequence[ir.Node | None]) -> None:
    """Removes those of `nodes` whose outputs nobody reads any more, in the order given (readers first)."""
    for node in nodes:
        if node is None or node.graph is None:
            continue
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            node.graph.remove(node, safe=True)
