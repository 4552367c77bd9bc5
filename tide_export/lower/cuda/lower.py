"""Lowers the segment networks for ONNX Runtime's CUDA provider.

They are the operators of ONNX Runtime that have a CUDA kernel: attention that rotates and caches in place, norms fused
with the addition before them, packed projections, matmuls of few bits. The only one of this project is `TideExit`, a
checkpoint in one launch (cpp/src/onnxruntime/exit_operator.cpp). The passes are those of the CPU's graph where these
make operators of ONNX Runtime. Gate and up projections stay two matmuls: no operator of the provider takes both, and a
Split would cost the launch that packing saves.
"""

from dataclasses import replace
from itertools import pairwise

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from tide_export.bundle.profiles import state_rows
from tide_export.compose.cut import Pieces, is_attention
from tide_export.compose.drafter_networks import DrafterPieces, compose_drafter_segment
from tide_export.compose.segments import compose_choices, compose_segments
from tide_export.compose.step_graph import LensWeights, RouterWeights
from tide_export.graph.rewriting import (
    FLOAT,
    HALF,
    nodes_of,
    op_before,
    producer,
    remove_unused,
    replace_value,
    run_passes,
)
from tide_export.lower.cuda.attention import GroupQueryAttentionPass, check_attention
from tide_export.lower.cuda.kernels import check_nodes
from tide_export.lower.networks import Networks, why_unbatched
from tide_export.lower.onnxruntime.flat_matmuls import FlatMatMulsPass
from tide_export.lower.onnxruntime.packed_projections import PackedProjectionsPass
from tide_export.lower.onnxruntime.quantized_matmuls import QuantizedMatMulsPass
from tide_export.lower.onnxruntime.skip_norms import SkipNormsPass
from tide_export.lower.onnxruntime.transposed_weights import TransposedWeightsPass
from tide_export.lower.tensorrt.drafter_for_tensorrt import unpack_matmuls
from tide_export.lower.tensorrt.expert_gather import ExpertGatherPass, max_gathering_tokens
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass, check_weights, of_positions
from tide_export.lower.tensorrt.shared_embedding import share_embedding
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names.networks import HEAD
from tide_export.names.operators import OP_EXIT
from tide_export.names.segment_networks import KEY_INDICES


def networks_for_cuda(
    pieces: Pieces,
    routers: RouterWeights,
    lenses: LensWeights | None,
    capacity: int,
    weights: str,
    quantized: QuantizedWeights | None = None,
) -> Networks:
    """The networks of `pieces`, ready to be saved.

    Args:
        capacity: tokens the K/V buffers hold; the `max_length` of `cut`.
        weights: fp16 or bf16, of weights, states and K/V; routers and logits are always float32. Also fp32, which
            GroupQueryAttention has on the CPU alone.
        quantized: the matrices that the trace names but does not hold, if the traced model is quantized.

    Raises:
        GraphError: a router or lens is missing or has another width.
        UnsupportedModelError: as `check_attention`.
    """
    _check_attentions(pieces)
    models = compose_segments(pieces, routers, lenses, capacity, state_rows(capacity))
    unbatched, bounds = why_unbatched(pieces), []
    precision = _precision(weights)
    for name, model in models.items():
        bounds.append(max_gathering_tokens(model))
        _lower(model, precision, quantized, transposes=name != HEAD)
    max_tokens = min((bound for bound in bounds if bound is not None), default=None)
    embedding = share_embedding(models, weights)
    _multiply_by_embedding(models[HEAD].graph)
    run_passes(models[HEAD], common_passes.RemoveUnusedNodesPass(), FlatMatMulsPass(), TransposedWeightsPass())
    models |= compose_choices(pieces.vocab_size)
    matrices = None if quantized is None or quantized.settings is None else f"int{quantized.settings.bits}"
    networks = Networks(models, weights, capacity, pieces.normalized_size, max_tokens, unbatched, matrices, embedding)
    return replace(networks, slot_tokens=1)  # of several sequences GroupQueryAttention takes one token each


def drafter_for_cuda(pieces: DrafterPieces, weights: str) -> ir.Model:
    """Returns the network of a drafter beside such networks, whose first input is EMBEDDINGS."""
    model = compose_drafter_segment(pieces)
    unpack_matmuls(model.graph, pieces)
    _lower(model, _precision(weights))
    return model


def check_for_cuda(pieces: Pieces, weights: str) -> None:
    """Checks that `networks_for_cuda` can lower `pieces` in `weights`, before routers are fitted.

    Raises:
        UnsupportedModelError: as `check_attention`, or an operator of the model has no CUDA kernel.
        GraphError: a weight holds a number too large for `weights`.
    """
    _check_attentions(pieces)
    bounds = pairwise(pieces.boundaries)
    parts = {f"layers {a} to {b - 1}": graph for (a, b), graph in zip(bounds, pieces.segments, strict=True)}
    parts = {"embedding": pieces.embed, **parts, "final norm": pieces.final_norm, "head": pieces.head}
    for part, piece in parts.items():
        wide = of_positions(piece).nodes
        check_nodes((node for node in piece.all_nodes() if node not in wide), part, {FLOAT: HALF[weights]})
        check_nodes(wide, part, {})
        check_weights(piece, weights)


def _check_attentions(pieces: Pieces) -> None:
    for (first, end), graph in zip(pairwise(pieces.boundaries), pieces.segments, strict=True):
        for node in filter(is_attention, graph):
            check_attention(node, f"layers {first} to {end - 1}")


def _precision(weights: str) -> list[HalfPrecisionPass]:
    """One pass for all networks of a model, so that a tensor they share remains one."""
    return [] if weights == "fp32" else [HalfPrecisionPass(weights)]


def _lower(
    model: ir.Model,
    precision: list[HalfPrecisionPass],
    quantized: QuantizedWeights | None = None,
    transposes: bool = True,
) -> None:
    blocks, settings = ({}, None) if quantized is None else (quantized.blocks, quantized.settings)
    run_passes(
        model,
        *([TransposedWeightsPass()] if transposes else []),  # a tied head's is found as it was traced
        GroupQueryAttentionPass(),
        common_passes.RemoveUnusedNodesPass(),  # or unused Reshape nodes would count as readers
        PackedProjectionsPass(),
        QuantizedMatMulsPass(blocks, settings, own=False),
        ExpertGatherPass(),
        common_passes.RemoveUnusedNodesPass(),
        SkipNormsPass(),
        *precision,
        common_passes.InlinePass(lambda function: function.name != OP_EXIT),
    )
    remove_unused(model)
    indices = [value for value in model.graph.inputs if value.name == KEY_INDICES]  # the operator takes lengths
    for value in indices:
        model.graph.inputs.remove(value)


def _multiply_by_embedding(head: ir.Graph) -> None:
    """Lets a tied head multiply by the embedding as it lies: a Transpose would copy it in every run."""
    for product in nodes_of(head, "MatMul"):
        transposed = producer(product.inputs[1], "Transpose")
        if transposed is not None and transposed.inputs[0] in head.inputs:
            output, factors = product.outputs[0], [product.inputs[0], transposed.inputs[0]]
            gemm = op_before(product, "Gemm", factors, {"transB": 1}, dtype=output.dtype, shape=output.shape)
            replace_value(output, gemm)
    head.sort()
