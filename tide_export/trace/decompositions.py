"""Keeps the exporter from tracing a model twice more where nothing is left to take apart.

Between capturing a model and writing it as ONNX, `torch.onnx.export` decomposes operators that it has no translation
for, by running the captured graph twice more on symbolic shapes: two thirds of a trace. What decoders are written of
it can nearly always translate as it stands. Then casts, assertions and a few others are brought into the form that the
two runs would give them, in place; a graph that writes into its own tensors, or that holds one operator without a
translation, takes the long way as before. Both ways give the same ONNX (`tests/trace/test_decompositions.py`), but for
an axis of Split that may be counted from the end.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

aten = torch.ops.aten
CASTS = (aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other)
# Written for who runs the exported program, and dropped by the exporter itself afterwards.
ASSERTIONS = (aten._assert_scalar.default, aten._assert_tensor_metadata.default)

TAKEN_APART = (aten.flatten.using_ints,)  # whose translation computes the shape anew where a view's knows it


@contextmanager
def spared_decompositions() -> Iterator[None]:
    """`torch.onnx.export` decomposes what needs it alone; without gradients, whose switching would count as a need."""
    decompose = _fx_passes.decompose_with_registry

    def spared(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
        translated = set(_decomp.get_onnx_implemented_overloads(registry))
        if not all(_stands(node, translated) for node in exported_program.graph.nodes):
            return decompose(exported_program, registry)
        _simplify(exported_program.graph_module, exported_program)
        return exported_program

    with torch.no_grad():
        _fx_passes.decompose_with_registry = spared
        try:
            yield
        finally:
            _fx_passes.decompose_with_registry = decompose


def _stands(node: Node, translated: set) -> bool:
    """Whether the exporter can write `node` as it is, or as `_simplify` leaves it."""
    if node.op == "get_attr":
        return not isinstance(getattr(node.graph.owning_module, str(node.target), None), GraphModule)
    if node.op != "call_function":
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        known = node.target in translated or node.target in (*CASTS, *ASSERTIONS, *REWRITTEN)
        return known and node.target not in TAKEN_APART and not node.target._schema.is_mutable
    # A part of a result, or arithmetic on the sizes of tensors.
    return node.target is operator.getitem or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _simplify(module: GraphModule, program: ExportedProgram) -> None:
    """What decomposing would leave: casts as `_to_copy` where the dtype changes and gone where not, no assertions nor
    what only they used, and the operators of REWRITTEN as others."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif node.target in CASTS:
            (source, *_), dtype = node.args, node.meta["val"].dtype
            if source.meta["val"].dtype != dtype:
                node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
                continue
            node.replace_all_uses_with(source)
            program.graph_signature.replace_all_uses(node.name, source.name)
            graph.erase_node(node)
        elif node.target in REWRITTEN:
            with graph.inserting_before(node):
                target, *arguments = REWRITTEN[node.target](graph, *node.args)
            node.target, node.args = target, tuple(arguments)
    graph.eliminate_dead_code()
    module.recompile()


def _reshaped(graph: Graph, states: Node, shape: Sequence) -> tuple:
    """A view, which is written with allowzero (right for an empty tensor too); it must be of one block."""
    whole = graph.call_function(aten.clone.default, (states,), {"memory_format": torch.contiguous_format})
    whole.meta = {**states.meta, "val": aten.clone.default(states.meta["val"], memory_format=torch.contiguous_format)}
    return aten.view.default, whole, shape


REWRITTEN: dict[object, Callable[..., tuple]] = {
    aten.reshape.default: _reshaped,
    aten.max.other: lambda _, *both: (aten.maximum.default, *both),
}
