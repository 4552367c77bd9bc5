"""Rewrites for ONNX Runtime. One pass a file; each works in the main graph and in every branch, weights stay in the
main graph. Contrib operators: docs/ContribOperators.md of microsoft/onnxruntime."""

from tide_export.lower.passes.expert_matmul import ExpertMatMulPass
from tide_export.lower.passes.flat_products import FlatProductsPass
from tide_export.lower.passes.group_query_attention import GroupQueryAttentionPass
from tide_export.lower.passes.packed_projections import PackedProjectionsPass
from tide_export.lower.passes.quantized_products import QuantizedProductsPass
from tide_export.lower.passes.skip_norms import SkipNormsPass
from tide_export.lower.passes.transposed_weights import TransposedWeightsPass

__all__ = [
    "ExpertMatMulPass",
    "FlatProductsPass",
    "GroupQueryAttentionPass",
    "PackedProjectionsPass",
    "QuantizedProductsPass",
    "SkipNormsPass",
    "TransposedWeightsPass",
]
