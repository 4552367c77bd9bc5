"""Lowers the network of a drafter for TensorRT, beside the segment networks and in their precision."""

import numpy as np
import onnx_ir as ir

from tide_export.compose.drafter_networks import DrafterPieces, compose_drafter_segment
from tide_export.graph.rewriting import (
    FLOAT,
    derived_weight,
    nodes_of,
    op_before,
    remove_unused,
    replace_value,
    required,
    run_passes,
)
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass
from tide_export.lower.tensorrt.scatter_attention import ScatterAttentionPass
from tide_export.names.operators import DOMAIN, OP_QUANTIZED_MATMUL


def drafter_for_tensorrt(pieces: DrafterPieces, weights: str, folds_queries: bool = False) -> ir.Model:
    """Returns the network of a drafter, whose first input is EMBEDDINGS.

    Args:
        weights: fp32, fp16 or bf16, of weights, embeddings, hidden states and K/V; logits are always float32.
        folds_queries: as `ScatterAttentionPass`.
    """
    model = compose_drafter_segment(pieces)
    unpack_matmuls(model.graph, pieces)
    precision = [HalfPrecisionPass(weights)] if weights != "fp32" else []
    run_passes(model, *precision, ScatterAttentionPass(folds_queries))
    remove_unused(model)
    return model


def unpack_matmuls(graph: ir.Graph, pieces: DrafterPieces) -> None:
    """Replaces every TideQuantizedMatMul by a MatMul of the matrix itself."""
    for node in nodes_of(graph, OP_QUANTIZED_MATMUL, DOMAIN):
        _unpack(graph, node, pieces)


def _unpack(graph: ir.Graph, node: ir.Node, pieces: DrafterPieces) -> None:
    """Replaces a TideQuantizedMatMul by a MatMul of the matrix itself."""
    (name,) = node.attributes["weights"].as_strings()
    matrix, output = pieces.matrices[name], node.outputs[0]
    rows, columns = matrix.shape
    weight = derived_weight(graph, name, [columns, rows], FLOAT, lambda: np.ascontiguousarray(matrix.T))
    x, *bias = map(required, node.inputs)
    product = op_before(node, "MatMul", [x, weight], dtype=FLOAT, shape=output.shape)
    if bias:
        product = op_before(node, "Add", [product, *bias], dtype=FLOAT, shape=output.shape)
    replace_value(output, product)
