"""Skips the exporter's decomposition runs for graphs that do not need them.

Between capturing a model and writing it as ONNX, `torch.onnx.export` decomposes operators that it cannot translate, by
running the captured graph twice more on symbolic shapes: two thirds of a trace. It can translate nearly all operators
that decoders are written of. For such graphs, casts, assertions, in-place operators (`functionalize`) and a few others
are rewritten directly to the form that the two runs would give them. A graph that writes through a view, or that holds
one operator without a translation, is decomposed as usual. Both ways compute the same, nearly always in the same ONNX
(`tests/trace/test_decompositions.py`): an axis of Split may be counted from the end, a size read off another tensor.

`fold_known_masks`, `_fold_numbers` and `_write_roots` change results. The rest saves time alone, and stays because
without it a trace takes 2.8 times as long, and an export of the demo model with given routers 1.4 times.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tide_export.trace.exporter.functionalize import functional, make_functional
from tide_export.trace.exporter.known_masks import fold_known_masks

aten = torch.ops.aten
CASTS = (aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other)
# For running the exported program; the exporter drops them.
ASSERTIONS = (aten._assert_scalar.default, aten._assert_tensor_metadata.default)

IDENTITIES = (aten.detach_.default,)  # without gradients


@contextmanager
def minimal_decompositions() -> Iterator[None]:
    """While open, `torch.onnx.export` decomposes only graphs that need it.

    Gradients are off: the operators that switch them would need it.
    """
    decompose = _fx_passes.decompose_with_registry

    def decompose_if_needed(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
        translated = set(_decomp.get_onnx_implemented_overloads(registry))
        fold_known_masks(exported_program.graph)
        _fold_numbers(exported_program, translated)
        _write_roots(exported_program)
        nodes = exported_program.graph.nodes
        in_place = {node: target for node in nodes if (target := functional(node)) is not None}
        if not all(_can_be_written(node, translated, in_place) for node in nodes):
            return decompose(exported_program, registry)
        _simplify(exported_program.graph_module, exported_program, in_place)
        return exported_program

    with torch.no_grad():
        _fx_passes.decompose_with_registry = decompose_if_needed
        try:
            yield
        finally:
            _fx_passes.decompose_with_registry = decompose


def _can_be_written(node: Node, translated: set, in_place: Mapping[Node, OpOverload]) -> bool:
    """Whether the exporter can write `node` unchanged, or as `_simplify` rewrites it.

    `in_place`: functional operators for the in-place nodes that can have one.
    """
    if node.op == "get_attr":
        return not isinstance(getattr(node.graph.owning_module, str(node.target), None), GraphModule)
    if node.op != "call_function":
        return True
    if isinstance(node.target, OpOverload):
        target = in_place.get(node, node.target)
        if target in (*CASTS, *ASSERTIONS, *IDENTITIES):
            return True
        if target in REWRITTEN:
            return not node.kwargs
        return target in translated and not target._schema.is_mutable
    # A part of a result, or arithmetic on the sizes of tensors.
    return node.target is operator.getitem or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _fold_numbers(program: ExportedProgram, translated: set) -> None:
    """Replaces one number computed from constants by its value, where the exporter cannot write it.

    Example: the inverse error function of Gemma 3n's activation sparsity.
    """
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    known: dict[Node, torch.Tensor] = {}
    for node in list(program.graph.nodes):
        if node.op == "placeholder" and node.name in constants:
            known[node] = program.constants[constants[node.name]]
        if not isinstance(node.target, OpOverload) or not set(node.all_input_nodes) <= known.keys():
            continue
        if not node.all_input_nodes or (node.target._schema.is_mutable and node.target not in IDENTITIES):
            continue
        value = node.target(*map_arg(node.args, known.get), **map_arg(node.kwargs, known.get))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            continue
        known[node] = value
        if node.target not in translated and node.target not in (*CASTS, *IDENTITIES):
            node.target, node.args = aten.full.default, (list(value.shape), value.item())
            node.kwargs = {"dtype": value.dtype}


def _write_roots(program: ExportedProgram) -> None:
    """Replaces powers of -1/2 by reciprocal roots, the form in which the exporter recognises a norm."""
    for node in program.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        if node.args[1] == -0.5:
            node.target, node.args = aten.rsqrt.default, node.args[:1]


def _simplify(module: GraphModule, program: ExportedProgram, in_place: Mapping[Node, OpOverload]) -> None:
    """Rewrites the graph to the form that decomposing would give.

    Casts become `_to_copy`, or are removed where the dtype stays; assertions and what only they used are removed; the
    operators of REWRITTEN are replaced.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node in in_place:
            before = make_functional(node, in_place[node])
            program.graph_signature.replace_all_uses(before.name, node.name)
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif node.target in CASTS and node.args[0].meta["val"].dtype != node.meta["val"].dtype:
            dtype = node.meta["val"].dtype
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype}
        elif node.target in (*CASTS, *IDENTITIES):
            node.replace_all_uses_with(node.args[0])
            program.graph_signature.replace_all_uses(node.name, node.args[0].name)
            graph.erase_node(node)
        elif node.target in REWRITTEN:
            with graph.inserting_before(node):
                target, *arguments = REWRITTEN[node.target](graph, *node.args)
            node.target, node.args = target, tuple(arguments)
    graph.eliminate_dead_code()
    module.recompile()


def _added(graph: Graph, target: OpOverload, *arguments: Argument) -> Node:
    """A new node before the one that is being rewritten."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


def _reshaped(graph: Graph, x: Node, shape: Sequence) -> tuple:
    """A view of contiguous memory, which is written with allowzero (right for an empty tensor too)."""
    whole = graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    whole.meta = {**x.meta, "val": aten.clone.default(x.meta["val"], memory_format=torch.contiguous_format)}
    return aten.view.default, whole, shape


def _flattened(graph: Graph, x: Node, first: int = 0, last: int = -1) -> tuple:
    """A view of a known shape, which the exporter would compute from the tensor."""
    sizes = x.meta["val"].shape
    if not sizes:
        return _reshaped(graph, x, [1])
    first, last = first % len(sizes), last % len(sizes)
    joined = math.prod(sizes[first : last + 1])
    shape = [_size(graph, x, dim) for dim in range(len(sizes))]
    return _reshaped(graph, x, [*shape[:first], joined if isinstance(joined, int) else -1, *shape[last + 1 :]])


def _size(graph: Graph, x: Node, dim: int) -> int | Node:
    """The size of a dimension: a number, or the first node that computes it."""
    size = x.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if node < x and node.meta["val"].node.expr == size.node.expr:
            return node
    return _added(graph, aten.sym_size.int, x, dim)


def _differences(
    graph: Graph, x: Node, n: int = 1, dim: int = -1, prepend: Node | None = None, append: Node | None = None
) -> tuple:
    """Differences of neighbours, taken `n` times."""
    parts = [part for part in (prepend, x, append) if part is not None]
    whole = _added(graph, aten.cat.default, parts, dim) if len(parts) > 1 else x
    subtract = aten.bitwise_xor.Tensor if x.meta["val"].dtype == torch.bool else aten.sub.Tensor
    for _ in range(n):
        later = _added(graph, aten.slice.Tensor, whole, dim, 1, sys.maxsize)
        earlier = _added(graph, aten.slice.Tensor, whole, dim, 0, -1)
        whole = _added(graph, subtract, later, earlier)
    return aten.clone.default, whole


def _transposed(_: Graph, x: Node) -> tuple:
    return aten.permute.default, x, list(reversed(range(x.meta["val"].dim())))


REWRITTEN: dict[object, Callable[..., tuple]] = {
    aten.reshape.default: _reshaped,
    aten.flatten.using_ints: _flattened,
    aten.diff.default: _differences,
    aten.numpy_T.default: _transposed,
    aten.max.other: lambda _, *both: (aten.maximum.default, *both),
    aten.__and__.Tensor: lambda _, *both: (aten.bitwise_and.Tensor, *both),
}
