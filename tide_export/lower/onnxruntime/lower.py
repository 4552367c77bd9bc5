"""Lowers the composed graph for ONNX Runtime.

Attention caches in place, norms are fused, projections packed.

Layer for layer the result is the graph that ONNX Runtime GenAI's builder writes by hand for each architecture: skip
norm, one MatMul for query, key and value, attention that rotates and caches in place, MatMul, skip norm, MLP. Here it
comes from rewrites of the trace, inside the branches of every `If` alike; in 16, 8 and 4 bits all of a segment's layers
are one node then.
"""

import logging

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.bundle.manifest import FLOAT32_KV
from tide_export.graph.rewriting import remove_unused, run_passes
from tide_export.lower.onnxruntime.attention import PagedAttentionPass
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.lower.onnxruntime.expert_rows import ExpertRowsPass
from tide_export.lower.onnxruntime.flat_matmuls import FlatMatMulsPass
from tide_export.lower.onnxruntime.gated_matmuls import GatedMatMulsPass
from tide_export.lower.onnxruntime.half_weights import HalfWeightsPass
from tide_export.lower.onnxruntime.layers import LayersPass
from tide_export.lower.onnxruntime.lora import LoraFunctionsPass
from tide_export.lower.onnxruntime.packed_projections import PackedProjectionsPass
from tide_export.lower.onnxruntime.paged_attention import PagedAttentionFunctionsPass
from tide_export.lower.onnxruntime.quantized_matmuls import QuantizedMatMulsPass, quantized_names
from tide_export.lower.onnxruntime.skip_norms import SkipNormsPass
from tide_export.lower.onnxruntime.state_functions import StateFunctionsPass
from tide_export.lower.onnxruntime.token_rows import TokenRowsPass
from tide_export.lower.onnxruntime.transposed_weights import TransposedWeightsPass
from tide_export.model.quantized_weights import QuantizedWeights

logger = logging.getLogger("tide_export")


def lower_for_onnxruntime(
    model: ir.Model, quantized: QuantizedWeights | None = None, half: str | None = None, kv_cache: str = FLOAT32_KV
) -> ir.Model:
    """Rewrites `model` (from `compose`) in place and returns it, ready to be saved.

    Args:
        quantized: the matrices that the trace names but does not hold, if the traced model is quantized.
        half: "bf16" or "fp16": store every matrix in it that loses nothing by it.
        kv_cache: the type of the K/V pages, "float32" or "int8".

    Raises:
        GraphError: an attention or a matmul has no ONNX Runtime kernel.
    """
    blocks, settings = ({}, None) if quantized is None else (quantized.blocks, quantized.settings)
    run_passes(
        model,
        FlatMatMulsPass(),  # first: the others keep the shapes they find
        TransposedWeightsPass(),
        PagedAttentionPass(kv_cache),
        common_passes.RemoveUnusedNodesPass(),  # or unused Reshape nodes would count as readers
        TokenRowsPass(),
        common_passes.RemoveUnusedNodesPass(),
        ExpertMatMulPass(blocks, settings, half),
        PackedProjectionsPass(),
        QuantizedMatMulsPass(blocks, settings),
        *([HalfWeightsPass(half)] if half else []),
        ExpertRowsPass(),
        common_passes.RemoveUnusedNodesPass(),
        GatedMatMulsPass(),
        LoraFunctionsPass(),
        SkipNormsPass(),
        PagedAttentionFunctionsPass(),
        StateFunctionsPass(),
    )
    remove_unused(model)
    used = {name for node in model.graph.all_nodes() for name in quantized_names(node)}
    run_passes(model, LayersPass())  # last: the others look for nodes that it makes one
    unused = sorted(blocks.keys() - used)
    if unused:
        logger.warning("%d quantized weights, such as %s, are float32 in the graph", len(unused), unused[0])
    return model
