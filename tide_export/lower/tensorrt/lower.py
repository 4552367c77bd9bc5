"""Lowers the segment networks for TensorRT.

They are strongly typed, of standard operators of opset 24 and `TideExit`.

`TideExit` is a function with a body, so ONNX Runtime runs the files that TensorRT builds its plans from.
"""

from itertools import pairwise

from tide_export.bundle.plan_fields import FP8
from tide_export.bundle.profiles import state_rows
from tide_export.compose.cut import Pieces, is_attention, number_of, sinks_and_bias
from tide_export.compose.segments import compose_choices, compose_segments
from tide_export.compose.step_graph import LensWeights, RouterWeights
from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import remove_unused, run_passes
from tide_export.lower.networks import Networks, why_unbatched
from tide_export.lower.tensorrt.expert_gather import ExpertGatherPass, max_gathering_tokens
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass, check_weights
from tide_export.lower.tensorrt.quantized_matmuls import QuantizedMatMulsPass
from tide_export.lower.tensorrt.scatter_attention import ScatterAttentionPass
from tide_export.lower.tensorrt.shared_embedding import share_embedding
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_EXPERT_MATMUL, OP_MARKER, OP_QUANTIZED_MATMUL

# Standard operators up to opset 24 that a language model could hold and that the parser of TensorRT for RTX 1.7 does
# not take (a test checks it). It lists NonZero as supported, but does not take it.
NOT_TAKEN = {
    *("Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Compress"),
    *("ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "Det", "DynamicQuantizeLinear", "MatMulInteger"),
    *("Multinomial", "NonZero", "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearMatMul"),
    *("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
    *("SequenceMap", "SplitToSequence", "SwiGLU", "Unique"),
}
SCATTERS = {"ScatterElements", "ScatterND"}  # taken without a reduction alone


def networks_for_tensorrt(
    pieces: Pieces,
    routers: RouterWeights,
    lenses: LensWeights | None,
    capacity: int,
    weights: str = "fp32",
    quantized: QuantizedWeights | None = None,
    folds_queries: bool = False,
) -> Networks:
    """The networks of `pieces`, ready to be saved.

    Args:
        capacity: tokens the K/V buffers hold; the `max_length` of `cut`.
        weights: fp32, fp16 or bf16, of weights, hidden states and K/V; routers and logits are always float32.
        quantized: the matrices that the trace names but does not hold, if the traced model is quantized.
        folds_queries: as `ScatterAttentionPass`.

    Raises:
        GraphError: a router or lens is missing or has another width.
        UnsupportedModelError: the model computes with an operator that TensorRT does not take.
    """
    check_operators(pieces)
    models = compose_segments(pieces, routers, lenses, capacity, state_rows(capacity))
    unbatched, bounds = why_unbatched(pieces), []
    precision = [HalfPrecisionPass(weights)] if weights != "fp32" else []
    for model in models.values():
        run_passes(model, *precision, QuantizedMatMulsPass({} if quantized is None else quantized.blocks))
        bounds.append(max_gathering_tokens(model))
        run_passes(model, ScatterAttentionPass(folds_queries), ExpertGatherPass())
        remove_unused(model)
    max_tokens = min((bound for bound in bounds if bound is not None), default=None)
    embedding = share_embedding(models, weights)
    models |= compose_choices(pieces.vocab_size)
    matrices = None if quantized is None else FP8 if quantized.settings is None else f"int{quantized.settings.bits}"
    return Networks(models, weights, capacity, pieces.normalized_size, max_tokens, unbatched, matrices, embedding)


def check_pieces(pieces: Pieces, weights: str) -> None:
    """Checks that `networks_for_tensorrt` can lower `pieces` and that its networks can be saved.

    Needs no routers.

    Raises:
        UnsupportedModelError: as `check_operators`.
        GraphError: a weight holds a number too large for `weights`.
    """
    check_operators(pieces)
    for piece in (pieces.embed, *pieces.segments, pieces.final_norm, pieces.head) if weights != "fp32" else ():
        check_weights(piece, weights)


def check_operators(pieces: Pieces) -> None:
    """Checks that TensorRT takes the operators of `pieces`.

    Needs no routers, so it can run before they are fitted.

    Raises:
        UnsupportedModelError: naming an operator TensorRT does not take, and where the model computes with it.
    """
    symbols = {(DOMAIN, name) for name in (OP_ATTENTION, OP_EXPERT_MATMUL, OP_MARKER)}
    symbols.add((DOMAIN, OP_QUANTIZED_MATMUL))
    for node in (node for graph in pieces.segments for node in graph if is_attention(node)):
        if None not in sinks_and_bias(node):
            raise UnsupportedModelError(
                f"the attention of layer {number_of(node) % pieces.boundaries[-1]} has sinks and a bias, which "
                "TensorRT does not take: use target onnxruntime"
            )
    bounds = pairwise(pieces.boundaries)
    parts = {f"layers {a} to {b - 1}": graph for (a, b), graph in zip(bounds, pieces.segments, strict=True)}
    parts = {"embedding": pieces.embed, **parts, "final norm": pieces.final_norm, "head": pieces.head}
    for part, graph in parts.items():
        for node in graph.all_nodes():
            reduction = node.attributes.get_string("reduction", "none") if node.op_type in SCATTERS else "none"
            taken = not node.domain and node.op_type not in NOT_TAKEN and reduction == "none"
            if taken or (node.domain, node.op_type) in symbols:
                continue
            operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            if reduction != "none":
                operator += f" that reduces by '{reduction}'"
            raise UnsupportedModelError(
                f"the model computes with {operator} (in its {part}), which TensorRT does not take: "
                "use target onnxruntime"
            )
