"""A matrix product between an `Unsqueeze` and a `Squeeze` of the batch axis is done on the matrix itself.

The step graph picks the rows that get logits as a matrix [m, D], and the traced head takes [B, S, D]. Where the head is
a product alone, both changes of shape go; where it does more (a softcap, a scale) they stay and cost little.

Postcondition: no `MatMul` or `tide::TideQuantizedMatMul` by a matrix stands alone between the two.
"""

import onnx_ir as ir

from tide_export.lower.rewriting import drop_unused, nodes_of, producer
from tide_export.names import DOMAIN, OP_QUANTIZED_MATMUL


class FlatProductsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for product in [*nodes_of(model, "MatMul"), *nodes_of(model, OP_QUANTIZED_MATMUL, DOMAIN)]:
            added, removed = producer(product.inputs[0], "Unsqueeze"), _only_reader(product.outputs[0], "Squeeze")
            if added is None or removed is None or not _same_axis(added, removed):
                continue
            matrix = added.inputs[0]
            if matrix is None or matrix.shape is None or len(matrix.shape) != 2 or not _by_matrix(product):
                continue
            product.replace_input_with(0, matrix)
            flat, result = product.outputs[0], removed.outputs[0]
            name, flat.shape = result.name, result.shape
            result.replace_all_uses_with(flat, replace_graph_outputs=True)
            drop_unused([removed, added])
            flat.name = name
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node that reads `value`, if there is no other and it is an `op_type`."""
    if value.is_graph_output() or len(uses := value.uses()) != 1:
        return None
    node = next(iter(uses)).node
    return node if (node.domain, node.op_type) == ("", op_type) else None


def _same_axis(added: ir.Node, removed: ir.Node) -> bool:
    """Whether both are about the first axis, and nothing else."""
    axes = [node.inputs[1].const_value if node.inputs[1] is not None else None for node in (added, removed)]
    return all(axis is not None and axis.numpy().tolist() == [0] for axis in axes)


def _by_matrix(product: ir.Node) -> bool:
    if product.domain == DOMAIN:
        return True
    weight = product.inputs[1]
    return weight is not None and weight.shape is not None and len(weight.shape) == 2
