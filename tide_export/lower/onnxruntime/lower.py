"""Lowers the composed graph for ONNX Runtime: in-place GroupQueryAttention, fused norms, packed projections.

Layer for layer the result is the graph ONNX Runtime GenAI's builder writes by hand for each architecture: skip norm,
one MatMul for query, key and value, attention that rotates and caches in place, MatMul, skip norm, MLP. Here it comes
from rewrites of whatever was traced, inside the branches of every `If` alike.
"""

import logging

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.errors import GraphError
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.lower.onnxruntime.flat_matmuls import FlatProductsPass
from tide_export.lower.onnxruntime.group_query_attention import GroupQueryAttentionPass
from tide_export.lower.onnxruntime.packed_projections import PackedProjectionsPass
from tide_export.lower.onnxruntime.quantized_matmuls import QuantizedProductsPass, quantized_names
from tide_export.lower.onnxruntime.skip_norms import SkipNormsPass
from tide_export.lower.onnxruntime.transposed_weights import TransposedWeightsPass
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names import OP_ATTENTION, OP_EXPERT_MATMUL

logger = logging.getLogger("tide_export")


def lower_for_onnxruntime(model: ir.Model, quantized: QuantizedWeights | None = None) -> ir.Model:
    """Rewrites `model` (from `compose`) in place and gives it back, ready to be saved.

    Args:
        quantized: the matrices that the trace left out, where the model that was traced is quantized.

    Raises:
        GraphError: an attention op or a product was left without a kernel.
    """
    blocks, settings = ({}, None) if quantized is None else (quantized.blocks, quantized.settings)
    ir.passes.Sequential(
        FlatProductsPass(),  # first: the others keep the shapes they find
        TransposedWeightsPass(),
        ExpertMatMulPass(),
        GroupQueryAttentionPass(),
        common_passes.RemoveUnusedNodesPass(),  # or the unused Reshape nodes would count as readers
        PackedProjectionsPass(),
        QuantizedProductsPass(blocks, settings),
        SkipNormsPass(),
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedFunctionsPass(),
        common_passes.RemoveUnusedOpsetsPass(),
    )(model)
    symbols = {OP_ATTENTION: "attention", OP_EXPERT_MATMUL: "expert product"}
    left = [node for node in model.graph.all_nodes() if node.op_type in symbols]
    if left:
        names = ", ".join(str(node.name) for node in left)
        raise GraphError(f"no ONNX Runtime {symbols[left[0].op_type]} for {names}")
    used = {name for node in model.graph.all_nodes() for name in quantized_names(node)}
    unused = sorted(blocks.keys() - used)
    if unused:
        logger.warning("%d quantized weights, such as %s, are float32 in the graph", len(unused), unused[0])
    return model
