"""Replaces `tide::TideExpertMatMul` by one batched MatMul over a copy of each row's expert.

TensorRT takes no list of rows whose length depends on data, so rows cannot be sorted by expert as in `expert_matmul`.
A decoding step reads only the weights of the chosen experts; every row of a longer run gathers one expert's, so such
networks take few tokens a run (`max_gathering_tokens`).
"""

import numpy as np
import onnx_ir as ir

from tide_export.graph.rewriting import (
    ensure_none_left,
    integers,
    last_dim,
    nodes_of,
    op_before,
    replace_value,
    require_arity,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_EXPERT_MATMUL

GATHERED_BYTES = 2**30  # of one matmul's gathered weights, at most (but one token's are always gathered)


class ExpertGatherPass(ir.passes.InPlacePass):
    """Replaces every node by a matmul with each row's gathered weights.

    Inputs of a node: rows [T, c, K], experts int64 [T, k], weights [E, N, K] (or [E, K, N] where `transposed`).
    """

    def requires(self, model: ir.Model) -> None:
        require_arity(model, OP_EXPERT_MATMUL, inputs=[3])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN)
        for node in nodes:
            _lower(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN))


def max_gathering_tokens(model: ir.Model) -> int | None:
    """Returns the tokens a run may take so that no matmul gathers more than GATHERED_BYTES.

    None if nothing is gathered.
    """
    bounds = []
    for node in nodes_of(model.graph, OP_EXPERT_MATMUL, DOMAIN):
        _, expert, weights = map(required, node.inputs)
        count, *matrix = (static_dim(weights, axis) for axis in range(3))
        itemsize = weights.dtype.itemsize if weights.dtype is not None else 4
        bytes_per_token = int(np.prod(matrix) * itemsize) * (last_dim(expert) or count)
        bounds.append(max(1, GATHERED_BYTES // bytes_per_token))
    return min(bounds, default=None)


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    rows, expert, weights = map(required, node.inputs)
    first, second = static_dim(weights, 1), static_dim(weights, 2)
    dtype, result, chosen = rows.dtype, node.outputs[0], last_dim(expert)
    shape = [None, chosen, first, second]
    matrices = op_before(node, "Gather", [weights, expert], {"axis": 0}, dtype=dtype, shape=shape)
    if node.attributes["transposed"].as_int():  # rows times matrix [K, N]
        axis = integers(graph, "axis_2", [2])
        lifted = op_before(node, "Unsqueeze", [rows, axis], dtype=dtype, shape=[None, None, 1, first])
        factors, shape = [lifted, matrices], [None, chosen, 1, second]
    else:  # matrix [N, K] times column
        axis = integers(graph, "axis_3", [3])
        lifted = op_before(node, "Unsqueeze", [rows, axis], dtype=dtype, shape=[None, None, second, 1])
        factors, shape = [matrices, lifted], [None, chosen, first, 1]
    product = op_before(node, "MatMul", factors, dtype=dtype, shape=shape)
    replace_value(result, op_before(node, "Squeeze", [product, axis], dtype=dtype, shape=result.shape))
