"""`tide::TideExpertMatMul` becomes one batched MatMul over a copy of each row's own expert.

For networks of one segment (`lower.tensorrt.lower`). TensorRT takes no list of rows whose length depends on data, so
rows cannot be sorted by expert as `expert_matmul` does it. A decoding step reads the weights of the chosen experts
alone; every row of a longer run gathers its own, so such networks take few tokens a run (`most_gathering`).

Precondition: inputs rows [R, K], expert int64 [R], weights [E, N, K] (or [E, K, N] where `transposed`).
Postcondition: none is left.
"""

import numpy as np
import onnx_ir as ir

from tide_export.lower.rewriting import add_before, constant, drop_unused, nodes_of
from tide_export.names import DOMAIN, OP_EXPERT_MATMUL

GATHERED_BYTES = 2**30  # of one product's gathered weights, at most (but one token's are always taken)


class ExpertGatherPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model, OP_EXPERT_MATMUL, DOMAIN)
        for node in nodes:
            _lower(model, node)
        return ir.passes.PassResult(model, modified=bool(nodes))


def most_gathering(model: ir.Model) -> int | None:
    """Tokens a run may take so that no product gathers more than GATHERED_BYTES; None where nothing is gathered.

    A row is a token and one of its experts; how many a token has is written in the shape that the experts were chosen
    in, [tokens, chosen].
    """
    bounds = []
    for node in nodes_of(model, OP_EXPERT_MATMUL, DOMAIN):
        expert, weights = node.inputs[1], node.inputs[2]
        assert weights is not None
        assert weights.shape is not None
        count, *matrix = (int(dim) for dim in weights.shape)  # type: ignore[arg-type]
        itemsize = weights.dtype.itemsize if weights.dtype is not None else 4
        each = int(np.prod(matrix) * itemsize) * _chosen(expert, count)
        bounds.append(max(1, GATHERED_BYTES // each))
    return min(bounds, default=None)


def _chosen(expert: ir.Value | None, count: int) -> int:
    """Experts per token: the last dimension of what was flattened to [R]; all of them where that is not known."""
    node = expert.producer() if expert is not None else None
    data = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    last = data.shape[-1] if data is not None and data.shape is not None and len(data.shape) else None
    return last if isinstance(last, int) else count


def _lower(model: ir.Model, node: ir.Node) -> None:
    rows, expert, weights = node.inputs
    assert rows is not None
    assert weights is not None
    assert weights.shape is not None
    matrix, wide = list(weights.shape)[1:], node.outputs[0].shape
    dtype = rows.dtype
    own = add_before(node, "Gather", [weights, expert], {"axis": 0}, outputs=[(dtype, [None, *matrix])]).outputs[0]
    if node.attributes["transposed"].as_int():  # row times matrix [K, N]
        axis = constant(model, "axis_1", np.array([1], dtype=np.int64))
        first, second, shapes = rows, own, ([None, 1, matrix[0]], [None, 1, matrix[1]])
    else:  # matrix [N, K] times column
        axis = constant(model, "axis_2", np.array([2], dtype=np.int64))
        first, second, shapes = own, rows, ([None, matrix[1], 1], [None, matrix[0], 1])
    lifted = add_before(node, "Unsqueeze", [rows, axis], outputs=[(dtype, shapes[0])]).outputs[0]
    pair = [lifted, second] if first is rows else [first, lifted]
    product = add_before(node, "MatMul", pair, outputs=[(dtype, shapes[1])]).outputs[0]
    flat = add_before(node, "Squeeze", [product, axis], outputs=[(dtype, wide)]).outputs[0]
    node.outputs[0].replace_all_uses_with(flat, replace_graph_outputs=True)
    drop_unused([node])
