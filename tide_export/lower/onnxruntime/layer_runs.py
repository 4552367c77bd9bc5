"""Finds runs of nodes that one operator can compute: those of all layers between two checkpoints.

They are matmuls in 16, 8 or 4 bits, paged attention, recurrences, norms, functions of each number, splits. Sound where
all nodes of a run compute rows of the same N tokens, and none reads what others make of the run's values.
"""

import math
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from tide_export.graph.rewriting import FLOAT, is_weight, last_dim, numbers_of, rank, required
from tide_export.names.operators import (
    DOMAIN,
    INTEGER_EXPERTS,
    INTEGER_MATMULS,
    OP_GATE,
    OP_GATED_MATMUL,
    OP_HALF_EXPERTS,
    OP_HALF_MATMUL,
    OP_LORA,
    OP_PAGED_ATTENTION,
    STATE_OPERATORS,
)

ALL_INTEGER_MATMULS = {name for plain in INTEGER_MATMULS for name in (plain, OP_GATED_MATMUL[plain])}
ALL_INTEGER_MATMULS |= set(INTEGER_EXPERTS)
HALF_MATMULS = {name for plain in OP_HALF_MATMUL.values() for name in (plain, OP_GATED_MATMUL[plain])}
HALF_MATMULS |= set(OP_HALF_EXPERTS.values())
HEAVY = ALL_INTEGER_MATMULS | HALF_MATMULS | set(OP_PAGED_ATTENTION.values())
NORMS = {("", "RMSNormalization"), ("", "LayerNormalization")}
SKIP_NORMS = {
    ("com.microsoft", "SkipSimplifiedLayerNormalization"),
    ("com.microsoft", "SkipLayerNormalization"),
}
UNARY, BINARY, RESHAPES = ("Sigmoid", "Softplus", "Exp", "Gelu"), ("Add", "Mul"), ("Reshape", "Unsqueeze")
FIRST_ALONE = ("Split", "Clip", "Slice", "ReduceSum")  # whose other inputs are constants, written as attributes
MIN_HEAVY = 2  # nodes that make a run worth it


class Run:
    """Nodes to be one, in their order; `after`: nodes between them that read values of theirs."""

    def __init__(self) -> None:
        self.nodes = list[ir.Node]()
        self.after = list[ir.Node]()
        self.hidden = set[ir.Value]()  # that nodes of it read or make
        self._later = list[ir.Node]()  # readers after the last node
        self._tainted = set[ir.Value]()

    def takes(self, node: ir.Node) -> bool:
        """Whether the node can come next: it reads the run's hidden states, and nothing others made of them."""
        read = read_by(node)
        return self._tainted.isdisjoint(read) and (not self.nodes or not self.hidden.isdisjoint(hidden_among(read)))

    def is_apart_from(self, node: ir.Node) -> bool:
        """Whether the node reads nothing that nodes of the run read or make."""
        return bool(self.nodes) and self._tainted.isdisjoint(read_by(node)) and self.hidden.isdisjoint(read_by(node))

    def add(self, node: ir.Node) -> None:
        self.nodes.append(node)
        self.after += self._later
        self._later.clear()
        self.hidden.update(hidden_among(read_by(node)), hidden_among(node.outputs))

    def pass_by(self, node: ir.Node) -> None:
        """Notes a node that is not of the run."""
        made = {value for own in self.nodes for value in own.outputs}
        if not (made | self._tainted).isdisjoint(_all_read(node)):
            self._later.append(node)
            self._tainted.update(node.outputs)

    def is_worth_it(self) -> bool:
        return sum(node.op_type in HEAVY for node in self.nodes) >= MIN_HEAVY


def runs_of(graph: ir.Graph) -> Iterator[Run]:
    """Yields the runs of `graph`, not those of its branches, that are worth an operator."""
    run = Run()
    for node in list(graph):
        if not _is_known(node) or (node.op_type in RESHAPES and run.is_apart_from(node)):
            run.pass_by(node)
            continue
        if not run.takes(node):
            if run.is_worth_it():
                yield run
            run = Run()
        run.add(node)
    if run.is_worth_it():
        yield run


def _is_known(node: ir.Node) -> bool:
    """Whether the operator may hold the node, which makes hidden states of the tokens that it reads."""
    keeps = node.domain == DOMAIN and node.op_type in (*OP_PAGED_ATTENTION.values(), *STATE_OPERATORS)
    made = node.outputs[:1] if keeps else [value for value in node.outputs if value.name]
    read = hidden_among(read_by(node))
    if not read or len(hidden_among(made)) < len(made):
        return False
    if len({required(value.shape)[1] for value in (*read, *made)}) > 1:
        return False
    if node.domain == DOMAIN:
        return node.op_type in HEAVY or keeps or node.op_type in (OP_GATE, OP_LORA)
    kind, first = (node.domain, node.op_type), made[0]
    if kind in NORMS:
        weights = node.inputs[1:]
        last = node.attributes.get_int("axis", -1) in (-1, required(rank(first)) - 1)
        return last and all(is_weight(each, 1) for each in weights if each)
    if kind in SKIP_NORMS:
        return True
    if node.domain:
        return False
    if node.op_type in BINARY:
        return all(value in read or _is_same_for_all(value, first) for value in read_by(node)) and (
            len({rank(value) for value in (*read, first)}) == 1
        )
    axis = node.attributes.get_int("axis", 0)
    if node.op_type == "Split":
        return axis in (-1, required(rank(first)) - 1)
    if node.op_type == "Clip":
        return all(value is None or numbers_of(value) is not None for value in node.inputs[1:])
    if node.op_type == "Slice":
        return strided(node) is not None
    if node.op_type == "ReduceSum":
        axes, whole = numbers_of(node.inputs[1] if len(node.inputs) > 1 else None), required(rank(node.inputs[0]))
        return whole == 4 and axes in ([-2], [2]) and not node.attributes.get_int("keepdims", 1)
    return node.op_type in (*UNARY, *RESHAPES)


def strided(node: ir.Node) -> tuple[int, int] | None:
    """Returns the first column and the step of a Slice of the last axis to its end; None: it is another."""
    start, end, axis, step = (numbers_of(value) or [None] for value in (*node.inputs[1:], None)[:4])
    width, whole = last_dim(node.inputs[0]), required(rank(node.inputs[0]))
    if width is None or None in (start[0], end[0]) or axis not in ([-1], [whole - 1]):
        return None
    first, every = int(start[0]), int(step[0] or 1)
    return (first, every) if 0 <= first < width and end[0] >= width and every > 0 else None


def _is_same_for_all(value: ir.Value, hidden: ir.Value) -> bool:
    """Whether a weight is added to or multiplied with every token's row of `hidden` alike."""
    own, whole = rank(value), required(rank(hidden))
    if not value.is_initializer() or value.dtype != FLOAT or own is None or own > whole:
        return False
    return all(dim == 1 for dim in list(required(value.shape))[: max(0, own - whole + 2)])


def read_by(node: ir.Node) -> list[ir.Value]:
    """The inputs of `node` that are there."""
    return [value for value in node.inputs if value is not None]


def _all_read(node: ir.Node) -> Iterator[ir.Value]:
    """Returns the values that the node and its branches read."""
    yield from read_by(node)
    for branch in branches_of(node):
        yield from branch.outputs
        for inner in branch.all_nodes():
            yield from read_by(inner)


def hidden_among(values: Iterable[ir.Value]) -> list[ir.Value]:
    """Returns the values that are computed float32 [1, N, ..]."""
    return [value for value in values if value.name and value.dtype == FLOAT and width_of(value) is not None]


def width_of(value: ir.Value) -> int | None:
    """Returns how many numbers of a token computed hidden states [1, N, ..] hold; None: they are none."""
    if value.is_initializer() or value.shape is None or len(value.shape) < 3 or value.shape[0] != 1:
        return None
    rest = [dim for dim in list(value.shape)[2:] if isinstance(dim, int)]
    known = len(rest) == len(value.shape) - 2 and not _is_unknown(value.shape[1])
    return math.prod(rest) if known else None


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is None


def branches_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs in the attributes of `node`."""
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]
