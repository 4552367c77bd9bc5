"""Removes an `Unsqueeze` and `Squeeze` of the batch axis around a matmul.

The matmul then runs on the matrix itself.

The step graph gathers the hidden states that get logits as a matrix [m, D], and the traced head takes [B, S, D]. Where
the head is one matmul by a weight, both reshapes go; where it does more (a softcap, a scale) they remain.
"""

from collections.abc import Iterator

import onnx_ir as ir

from tide_export.graph.rewriting import drop_unused, ensure_none_left, nodes_of, producer, rank, replace_value
from tide_export.names.operators import DOMAIN, OP_QUANTIZED_MATMUL


class FlatMatMulsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for matmul, added, removed in _between_reshapes(model):
            matmul.replace_input_with(0, added.inputs[0])
            flat, result = matmul.outputs[0], removed.outputs[0]
            flat.shape = result.shape
            replace_value(result, flat)
            drop_unused([added])
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(matmul for matmul, _, _ in _between_reshapes(model))


def _between_reshapes(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Node, ir.Node]]:
    """Yields each matmul by a weight alone between an Unsqueeze and a Squeeze of the first axis.

    The two come with it.
    """
    for matmul in [*nodes_of(model.graph, "MatMul"), *nodes_of(model.graph, OP_QUANTIZED_MATMUL, DOMAIN)]:
        added, removed = producer(matmul.inputs[0], "Unsqueeze"), _only_reader(matmul.outputs[0], "Squeeze")
        if added is None or removed is None or not _of_first_axis(added, removed) or rank(added.inputs[0]) != 2:
            continue
        if matmul.domain == DOMAIN or rank(matmul.inputs[1]) == 2:
            yield matmul, added, removed


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node that reads `value`, if there is no other and it is an `op_type`."""
    if value.is_graph_output() or len(uses := value.uses()) != 1:
        return None
    node = next(iter(uses)).node
    return node if (node.domain, node.op_type) == ("", op_type) else None


def _of_first_axis(added: ir.Node, removed: ir.Node) -> bool:
    axes = [node.inputs[1].const_value if node.inputs[1] is not None else None for node in (added, removed)]
    return all(axis is not None and axis.numpy().tolist() == [0] for axis in axes)
