"""Reads and changes graphs: what the passes of `trace`, `compose` and `lower` share."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike
from onnx_ir.passes import common as common_passes

from tide_export.errors import GraphError
from tide_export.graph.contents import Contents
from tide_export.names.operators import DOMAIN

logger = logging.getLogger("tide_export")

T = TypeVar("T")
Dim = int | ir.SymbolicDim
OutputType = tuple[ir.DataType | None, Iterable[Any] | None]  # dtype and shape, None where unknown

HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
BOOL, FLOAT, INT32, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
MAX_NUMBERS = 4  # of a constant that is read as numbers
SWAP_HEADS = [0, 2, 1, 3]  # [B, H, S, Dh] <-> [B, S, H, Dh]


def run_passes(model: ir.Model, *passes: ir.passes.PassBase) -> None:
    """Runs in-place `passes` over `model`, in order.

    At log level DEBUG each that changes something has a line, `Contents.since`.

    Raises:
        GraphError: a pass found its precondition not met, or did not meet its postcondition.
    """
    before = Contents(model) if logger.isEnabledFor(logging.DEBUG) else None
    for rewrite in passes:
        try:
            modified = rewrite(model).modified
        except ir.passes.InvariantError as error:
            raise GraphError(str(error)) from error
        if modified and before is not None:
            after = Contents(model)
            logger.debug("%s: %s", type(rewrite).__name__, after.since(before))
            before = after


def remove_unused(model: ir.Model) -> None:
    """Removes nodes, functions and opset imports that are not used; orders weights by first use.

    `ir.convenience.extract` leaves weights in the order of addresses, so that no two exports would be equal files.
    """
    run_passes(
        model,
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedFunctionsPass(),
        common_passes.RemoveUnusedOpsetsPass(),
    )
    weights = model.graph.initializers
    read = [value.name for node in model.graph.all_nodes() for value in node.inputs if value is not None]
    for name in dict.fromkeys(read):
        if name is not None and name in weights:
            weights[name] = weights.pop(name)


def require_arity(model: ir.Model, op_type: str, inputs: Sequence[int], outputs: Sequence[int] = (1,)) -> None:
    """Checks the numbers of inputs and outputs of every `tide::op_type`.

    Raises PreconditionError if one has a number of inputs not in `inputs`, or of outputs not in `outputs`.
    """
    for node in nodes_of(model.graph, op_type, DOMAIN):
        if len(node.inputs) not in inputs or len(node.outputs) not in outputs:
            raise ir.passes.PreconditionError(
                f"{op_type} {node.name} has {len(node.inputs)} inputs and {len(node.outputs)} outputs"
            )


def ensure_none_left(nodes: Iterable[ir.Node]) -> None:
    """Raises PostconditionError naming `nodes`, which a pass should have replaced, if there are any."""
    left = [f"{node.op_type} {node.name}" for node in nodes]
    if left:
        raise ir.passes.PostconditionError(f"the graph still holds {', '.join(left)}")


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that computes `value` if it is an `op_type`."""
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == (domain, op_type) else None


def nodes_of(graph: ir.Graph, op_type: str, domain: str = "") -> list[ir.Node]:
    """All nodes of a type, those of branches included, as a list so that the graph may change meanwhile."""
    return [node for node in graph.all_nodes() if (node.domain, node.op_type) == (domain, op_type)]


class WidenedTensor(ir.LazyTensor):
    """A float32 tensor whose numbers are held in 16 bits, and widened on access.

    Attributes:
        stored: its numbers.
    """

    def __init__(self, name: str, stored: np.ndarray):
        def widen() -> ir.TensorProtocol:
            return ir.tensor(stored.astype(np.float32, order="C"), name=name)

        super().__init__(widen, dtype=FLOAT, shape=ir.Shape(stored.shape), name=name)
        self.stored = stored


def required(value: T | None) -> T:
    """Returns `value`, which every valid graph has.

    Examples: an input that its operator requires, the tensor of a weight.
    """
    assert value is not None
    return value


def dims(value: ir.Value | None) -> list[Dim]:
    """The dimensions of `value`.

    Raises:
        GraphError: its shape is unknown.
    """
    if value is None or value.shape is None:
        raise GraphError(f"the trace lost the shape of {value.name if value is not None else 'an input'}")
    return list(value.shape)


def rank(value: ir.Value | None) -> int | None:
    """The number of dimensions, if known."""
    return None if value is None or value.shape is None else len(value.shape)


def static_dim(value: ir.Value | None, axis: int) -> int:
    """A dimension that must be a number.

    Raises:
        GraphError: it is unknown or symbolic.
    """
    dim = dims(value)[axis]
    if not isinstance(dim, int):
        raise GraphError(f"the trace lost the size of dimension {axis} of {required(value).name}")
    return dim


def last_dim(value: ir.Value | None) -> int | None:
    """The size of the last dimension, if known."""
    last = value.shape[-1] if value is not None and value.shape else None
    return last if isinstance(last, int) else None


def is_weight(value: ir.Value | None, of_rank: int) -> bool:
    """Whether `value` is an initializer of that rank."""
    return value is not None and value.is_initializer() and rank(value) == of_rank


def number_of(value: ir.Value | None) -> int | float | None:
    """Returns the number of a constant that holds one; None: it is no such constant."""
    stored = None if value is None else value.const_value
    return stored.numpy().item() if stored is not None and stored.size == 1 else None


def numbers_of(value: ir.Value | None) -> list | None:
    """Returns the numbers of a constant, flat; None: it is none, or holds more than `MAX_NUMBERS`."""
    stored = None if value is None else value.const_value
    return stored.numpy().reshape(-1).tolist() if stored is not None and stored.size <= MAX_NUMBERS else None


def typed_value(name: str, dtype: ir.DataType, shape: Iterable[Any]) -> ir.Value:
    """A value for a graph input."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def initializer(tensor: ir.TensorProtocol) -> ir.Value:
    """`tensor` as a value of the same name, for a graph to register."""
    return ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """The initializer `name` of the main graph; registers `array` under that name the first time."""
    return graph.initializers.get(name) or register(graph, ir.tensor(array, name=name))


def integers(graph: ir.Graph, name: str, numbers: ArrayLike) -> ir.Value:
    """Returns the initializer `name` of the main graph, of int64 numbers."""
    return constant(graph, name, np.array(numbers, dtype=np.int64))


def derived_weight(
    graph: ir.Graph, name: str, shape: Sequence[int], dtype: ir.DataType, compute: Callable[[], np.ndarray]
) -> ir.Value:
    """Registers a weight that is computed from others only when the model is written.

    So a second copy is never held in memory.
    """
    lazy = ir.LazyTensor(lambda: ir.tensor(compute(), name=name), dtype=dtype, shape=ir.Shape(shape), name=name)
    return graph.initializers.get(name) or register(graph, lazy)


def register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds `tensor` to the initializers of `graph` under its name, which is new."""
    value = initializer(tensor)
    graph.register_initializer(value)
    return value


def new_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping | None = None,
    *,
    name: str,
    domain: str = "",
    outputs: Sequence[OutputType],
) -> ir.Node:
    """A node that no graph holds yet, its outputs `name`.0, `name`.1, ..."""
    node = ir.node(op_type, inputs, attributes=attributes or {}, domain=domain, num_outputs=len(outputs), name=name)
    for index, (value, (dtype, shape)) in enumerate(zip(node.outputs, outputs, strict=True)):
        value.name = f"{name}.{index}"
        value.type = ir.TensorType(dtype) if dtype is not None else None
        value.shape = ir.Shape(shape) if shape is not None else None
    return node


def ops_before(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping | None = None,
    *,
    domain: str = "",
    types: Sequence[OutputType],
    suffix: str = "",
) -> list[ir.Value]:
    """Adds a node before `node`, in its graph and named after it.

    Returns its outputs, one per (dtype, shape) of `types`.
    """
    name = f"{node.name}/{op_type}{suffix}"
    new = new_node(op_type, inputs, attributes, name=name, domain=domain, outputs=types)
    graph_of(node).insert_before(node, new)
    return list(new.outputs)


def op_before(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping | None = None,
    *,
    domain: str = "",
    dtype: ir.DataType | None = None,
    shape: Iterable[Any] | None = None,
    suffix: str = "",
) -> ir.Value:
    """Adds a node with one output before `node`, by `ops_before`; returns the output."""
    types = [(dtype, shape)]
    (value,) = ops_before(node, op_type, inputs, attributes, domain=domain, types=types, suffix=suffix)
    return value


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph or branch that holds `node`."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Lets all readers of `old` read `new`, which takes its name and its place among the graph's outputs."""
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    drop_unused([old.producer()])
    new.name = name


def drop_unused(nodes: Iterable[ir.Node | None]) -> None:
    """Removes those of `nodes` whose outputs have no reader, in this order (readers first)."""
    for node in nodes:
        if node is None or node.graph is None:
            continue
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            node.graph.remove(node, safe=True)
