"""Computes layers by one operator of `cpp/ops`.

Its threads meet between its nodes' phases and not between operators.

Each node of a run (matmuls in 16, 8 or 4 bits, paged attention, recurrences, norms, functions of each number, splits)
becomes a line of the operator's attribute `nodes`:

    slots 576 1536
    RMSNormalization s0 = i0 w5 epsilon=1e-05
    TideInt4MatMul s1 = s0 w6 w7

`i` and `w` are the operator's inputs, `w` those that are initializers, `o` its outputs, all by number; `s` are states
[1, N, ..] between nodes, in memory that the first line gives the widths of; `-` is absent. `cpp/ops/layers_node.cpp`
reads it. The nodes themselves are the body of a model-local function, which an ONNX Runtime inlines where the operator
is not registered.

Sound where all nodes of a run compute rows of the same N tokens, and none reads what others make of the run's values.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.graph.rewriting import FLOAT, graph_of, is_weight, last_dim, new_node, numbers_of, rank, required
from tide_export.names.operators import (
    DOMAIN,
    INTEGER_EXPERTS,
    INTEGER_MATMULS,
    OP_CAUSAL_CONV,
    OP_GATE,
    OP_GATED_MATMUL,
    OP_HALF_EXPERTS,
    OP_HALF_MATMUL,
    OP_INTEGER_LAYERS,
    OP_LAYERS,
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
ATTENTION_ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "rotary_interleaved")
LORA_ATTRIBUTES = ("offset", "rank", "column", "width")
MIN_HEAVY = 2  # nodes that make a run worth it


class LayersPass(ir.passes.InPlacePass):
    """After all passes that change nodes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in _graphs(model.graph):
            for run in list(_runs(graph)):
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
        for branch in _branches(node):
            yield from _graphs(branch)


def _branches(node: ir.Node) -> list[ir.Graph]:
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]


class _Run:
    """Nodes to be one, in their order; `after`: nodes between them that read values of theirs."""

    def __init__(self) -> None:
        self.nodes = list[ir.Node]()
        self.after = list[ir.Node]()
        self.states = set[ir.Value]()  # that nodes of it read or make
        self._later = list[ir.Node]()  # readers after the last node
        self._tainted = set[ir.Value]()

    def takes(self, node: ir.Node) -> bool:
        read = _read(node)
        return self._tainted.isdisjoint(read) and (not self.nodes or not self.states.isdisjoint(_states(read)))

    def is_apart_from(self, node: ir.Node) -> bool:
        """Whether the node reads nothing that nodes of the run read or make."""
        return bool(self.nodes) and self._tainted.isdisjoint(_read(node)) and self.states.isdisjoint(_read(node))

    def add(self, node: ir.Node) -> None:
        self.nodes.append(node)
        self.after += self._later
        self._later.clear()
        self.states.update(_states(_read(node)), _states(node.outputs))

    def pass_by(self, node: ir.Node) -> None:
        """Notes a node that is not of the run."""
        made = {value for own in self.nodes for value in own.outputs}
        if not (made | self._tainted).isdisjoint(_all_read(node)):
            self._later.append(node)
            self._tainted.update(node.outputs)

    def is_worth_it(self) -> bool:
        return sum(node.op_type in HEAVY for node in self.nodes) >= MIN_HEAVY


def _runs(graph: ir.Graph) -> Iterator[_Run]:
    run = _Run()
    for node in list(graph):
        if not _is_known(node) or (node.op_type in RESHAPES and run.is_apart_from(node)):
            run.pass_by(node)
            continue
        if not run.takes(node):
            if run.is_worth_it():
                yield run
            run = _Run()
        run.add(node)
    if run.is_worth_it():
        yield run


def _is_known(node: ir.Node) -> bool:
    """Whether the operator may hold the node, which makes states of the tokens that it reads."""
    keeps = node.domain == DOMAIN and node.op_type in (*OP_PAGED_ATTENTION.values(), *STATE_OPERATORS)
    made = node.outputs[:1] if keeps else [value for value in node.outputs if value.name]
    read = _states(_read(node))
    if not read or len(_states(made)) < len(made) or len({required(value.shape)[1] for value in (*read, *made)}) > 1:
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
        return all(value in read or _is_same_for_all(value, first) for value in _read(node)) and (
            len({rank(value) for value in (*read, first)}) == 1
        )
    axis = node.attributes.get_int("axis", 0)
    if node.op_type == "Split":
        return axis in (-1, required(rank(first)) - 1)
    if node.op_type == "Clip":
        return all(value is None or numbers_of(value) is not None for value in node.inputs[1:])
    if node.op_type == "Slice":
        return _strided(node) is not None
    if node.op_type == "ReduceSum":
        axes, whole = numbers_of(node.inputs[1] if len(node.inputs) > 1 else None), required(rank(node.inputs[0]))
        return whole == 4 and axes in ([-2], [2]) and not node.attributes.get_int("keepdims", 1)
    return node.op_type in (*UNARY, *RESHAPES)


def _strided(node: ir.Node) -> tuple[int, int] | None:
    """Returns the first column and the step of a Slice of the last axis to its end; None: it is another."""
    start, end, axis, step = (numbers_of(value) or [None] for value in (*node.inputs[1:], None)[:4])
    width, whole = last_dim(node.inputs[0]), required(rank(node.inputs[0]))
    if width is None or None in (start[0], end[0]) or axis not in ([-1], [whole - 1]):
        return None
    first, every = int(start[0]), int(step[0] or 1)
    return (first, every) if 0 <= first < width and end[0] >= width and every > 0 else None


def _is_same_for_all(value: ir.Value, states: ir.Value) -> bool:
    """Whether a weight is added to or multiplied with every token's row of `states` alike."""
    own, whole = rank(value), required(rank(states))
    if not value.is_initializer() or value.dtype != FLOAT or own is None or own > whole:
        return False
    return all(dim == 1 for dim in list(required(value.shape))[: max(0, own - whole + 2)])


def _read(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _all_read(node: ir.Node) -> Iterator[ir.Value]:
    """Returns the values that the node and its branches read."""
    yield from _read(node)
    for branch in _branches(node):
        yield from branch.outputs
        for inner in branch.all_nodes():
            yield from _read(inner)


def _states(values: Iterable[ir.Value]) -> list[ir.Value]:
    """Returns the values that are computed float32 [1, N, ..]."""
    return [value for value in values if value.name and value.dtype == FLOAT and _width(value) is not None]


def _width(value: ir.Value) -> int | None:
    """Returns how many numbers of a token computed states [1, N, ..] hold; None: they are no such states."""
    if value.is_initializer() or value.shape is None or len(value.shape) < 3 or value.shape[0] != 1:
        return None
    rest = [dim for dim in list(value.shape)[2:] if isinstance(dim, int)]
    known = len(rest) == len(value.shape) - 2 and not _is_unknown(value.shape[1])
    return math.prod(rest) if known else None


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is None


def _replace(model: ir.Model, run: _Run, overload: str) -> None:
    own = set(run.nodes)
    inputs = list(dict.fromkeys(value for node in run.nodes for value in _read(node) if value.producer() not in own))
    first = next(iter(_states(_read(run.nodes[0]))))
    inputs.sort(key=lambda value: value is not first)
    outputs = [value for node in run.nodes for value in node.outputs if value.name and _is_read_outside(value, own)]
    op_type = OP_INTEGER_LAYERS if any(node.op_type in ALL_INTEGER_MATMULS for node in run.nodes) else OP_LAYERS
    layers = new_node(
        op_type,
        inputs,
        {"nodes": _written(run.nodes, inputs, outputs)},
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


def _written(nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> str:
    """Returns the attribute `nodes`.

    States between nodes share memory where none is needed at the same time.
    """
    places: dict[ir.Value | None, str] = {None: "-"}
    places |= {value: f"{'w' if value.is_initializer() else 'i'}{i}" for i, value in enumerate(inputs)}
    places |= {value: f"o{i}" for i, value in enumerate(outputs)}
    last_read = {value: i for i, node in enumerate(nodes) for value in _read(node)}
    widths, free, lines = list[int](), set[int](), list[str]()
    for i, node in enumerate(nodes):
        for value in node.outputs:
            if value in places or not value.name:
                continue
            if value not in last_read:
                places[value] = "-"
                continue
            before = node.inputs[0]
            if (
                node.op_type in (OP_LORA, *RESHAPES)
                and last_read[required(before)] == i
                and places[before].startswith("s")
            ):
                places[value] = places[before]  # changed in place
                continue
            width = required(_width(value))
            slot = min(free, key=lambda each: abs(widths[each] - width), default=len(widths))
            if slot == len(widths):
                widths.append(width)
            free.discard(slot)
            widths[slot] = max(widths[slot], width)
            places[value] = f"s{slot}"
        results = [places[value] if value.name else "-" for value in node.outputs]
        name, inputs_read = ("Reshape", 1) if node.op_type in RESHAPES else (node.op_type, len(node.inputs))
        read = [places[value] for value in node.inputs[: 1 if name in FIRST_ALONE else inputs_read]]
        lines.append(" ".join([name, *results, "=", *read, *_attributes(node)]))
        for value in dict.fromkeys(_read(node)):
            if last_read[value] == i and places[value].startswith("s") and places[value] not in results:
                free.add(int(places[value][1:]))
    return "\n".join([" ".join(["slots", *map(str, widths)]), *lines])


def _attributes(node: ir.Node) -> Iterator[str]:
    shape = required(node.outputs[0].shape)
    if node.op_type in RESHAPES:
        yield f"shape={','.join(map(str, shape[2:]))}"
    if node.op_type == "Split":
        yield f"sizes={','.join(str(last_dim(value)) for value in node.outputs)}"
    if node.op_type == "Clip":
        for name, value in zip(("low", "high"), node.inputs[1:], strict=False):
            if value is not None:
                yield f"{name}={np.float32(required(numbers_of(value))[0])!s}"
    if node.op_type == "Slice":
        yield "start={} step={}".format(*required(_strided(node)))
    names: Sequence[str] = ("epsilon",) if (node.domain, node.op_type) in NORMS | SKIP_NORMS else ()
    if node.op_type in OP_PAGED_ATTENTION.values():
        names = ATTENTION_ATTRIBUTES
    elif node.op_type == OP_LORA:
        names = LORA_ATTRIBUTES
    elif node.op_type == OP_CAUSAL_CONV:
        names = ("silu",)
    elif node.op_type == "Gelu":
        names = ("approximate",)
    for name in names:
        if name in node.attributes:
            value = node.attributes[name].value
            yield f"{name}={str(np.float32(value)) if isinstance(value, float) else value}"
