"""Lowers the segment networks for TensorRT.

They are strongly typed, of standard operators of opset 24 and `TideExit`.

`TideExit` is a function with a body, so ONNX Runtime runs the files that TensorRT builds its plans from.
"""

import logging
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

from tide_export.bundle.file_names import EMBEDDING_FILE, SEGMENTS_FOLDER, SEGMENTS_WEIGHTS_FILE, network_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.plan_fields import FP8, NetworksInfo
from tide_export.bundle.profiles import BATCH_SIZE, run_sizes, state_rows
from tide_export.compose.cut import Pieces, check_positions, is_attention, number_of, sinks_and_bias
from tide_export.compose.segments import compose_choices, compose_segments
from tide_export.compose.step_graph import LensWeights, RouterWeights
from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import remove_unused, run_passes
from tide_export.lower.tensorrt.expert_gather import ExpertGatherPass, max_gathering_tokens
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass, check_weights
from tide_export.lower.tensorrt.quantized_matmuls import QuantizedMatMulsPass
from tide_export.lower.tensorrt.scatter_attention import ScatterAttentionPass
from tide_export.lower.tensorrt.shared_embedding import SharedEmbedding, share_embedding
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_EXPERT_MATMUL, OP_MARKER, OP_QUANTIZED_MATMUL

logger = logging.getLogger("tide_export")

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
EXTERNAL_BYTES = 1024  # smaller tensors stay in the .onnx
ALIGNMENT = 256  # bytes; of every address a network is given (cpp/src/segmented/device.h)


@dataclass(frozen=True)
class Networks:
    """The networks of one model, by name: `segment_name(k)`, shallowest first, and `AFTER_SEGMENTS`.

    Attributes:
        weights: fp32, fp16 or bf16, of hidden states and K/V, and of all weights but `matrices`.
        capacity: tokens the K/V buffers hold, the longest sequence.
        exit_size: width D' of the hidden states the head takes.
        max_tokens: tokens a run may take, if experts are gathered.
        unbatched: why sequences cannot be batched, if they cannot.
        matrices: int4 or fp8, of the layers' matrices; None: as `weights`.
        embedding: their input `EMBEDDING`, if they have it.
    """

    models: dict[str, ir.Model]
    weights: str
    capacity: int
    exit_size: int
    max_tokens: int | None = None
    unbatched: str | None = None
    matrices: str | None = None
    embedding: SharedEmbedding | None = None

    def info(self, manifest: Manifest, batch_size: int = BATCH_SIZE) -> NetworksInfo:
        """Returns the networks' entry in the manifest.

        Logs a warning if they cannot take `batch_size` sequences in a run.

        Args:
            manifest: of their bundle so far.
            batch_size: the most sequences of a run.
        """
        unbatched = self.unbatched or self._unaligned(manifest)
        if unbatched is not None and batch_size > 1:
            logger.warning("the networks for TensorRT will take one prompt at a time: %s", unbatched)
        sizes = run_sizes(self.capacity, manifest.max_pending, 1 if unbatched else batch_size, self.max_tokens)
        return NetworksInfo(
            self.weights,
            self.capacity,
            state_rows(self.capacity),
            sizes.max_tokens,
            sizes.max_logits,
            self.exit_size,
            sizes.max_batch_size,
            sizes.max_slot_tokens,
            self.matrices,
            None if self.embedding is None else self.embedding.info,
        )

    def _unaligned(self, manifest: Manifest) -> str | None:
        """Returns why a run cannot start at any slot of a batch, None if it can.

        It binds the addresses of the slot's buffers.
        """
        item = 4 if self.weights == "fp32" else 2
        buffers = {("K/V", heads * width * item) for heads, width in manifest.model.kv_shapes}
        buffers |= {("states", width * item) for width in (manifest.model.hidden_size, self.exit_size)}
        for what, token in sorted(buffers):
            if self.capacity * token % ALIGNMENT:
                return (
                    f"the {what} of one, {self.capacity * token} bytes a layer, is no multiple of {ALIGNMENT}: make "
                    f"--max-length one of {ALIGNMENT // math.gcd(ALIGNMENT, token)}"
                )
        return None

    def save(self, folder: Path) -> None:
        """Writes every network to `folder`/segments.

        They share one file of weights; the embedding has another.
        """
        target = folder / SEGMENTS_FOLDER
        target.mkdir()
        if self.embedding is not None:
            (folder / EMBEDDING_FILE).write_bytes(self.embedding.matrix.tobytes())
        large: dict[str, ir.TensorProtocol] = {}
        weights = [item for model in self.models.values() for item in model.graph.initializers.items()]
        for name, value in weights:
            if value.const_value is not None and value.const_value.nbytes >= EXTERNAL_BYTES:
                large.setdefault(name, value.const_value)
        external = convert_tensors_to_external(list(large.values()), target, SEGMENTS_WEIGHTS_FILE)
        stored = dict(zip(large, external, strict=True))
        for name, value in weights:
            if name in stored:
                value.const_value = stored[name]
        for name, model in self.models.items():
            ir.save(model, folder / network_file(name))


def networks_for_tensorrt(
    pieces: Pieces,
    routers: RouterWeights,
    lenses: LensWeights | None,
    capacity: int,
    weights: str = "fp32",
    quantized: QuantizedWeights | None = None,
) -> Networks:
    """The networks of `pieces`, ready to be saved.

    Args:
        capacity: tokens the K/V buffers hold; the `max_length` of `cut`.
        weights: fp32, fp16 or bf16, of weights, hidden states and K/V; routers and logits are always float32.
        quantized: the matrices that the trace names but does not hold, if the traced model is quantized.

    Raises:
        GraphError: a router or lens is missing or has another width.
        UnsupportedModelError: the model computes with an operator that TensorRT does not take.
    """
    check_operators(pieces)
    models = compose_segments(pieces, routers, lenses, capacity, state_rows(capacity))
    unbatched, bounds = None, []
    try:
        check_positions(pieces)
    except UnsupportedModelError as error:
        unbatched = str(error)
    precision = [HalfPrecisionPass(weights)] if weights != "fp32" else []
    for model in models.values():
        run_passes(model, *precision, QuantizedMatMulsPass({} if quantized is None else quantized.blocks))
        bounds.append(max_gathering_tokens(model))
        run_passes(model, ScatterAttentionPass(), ExpertGatherPass())
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
