"""The stage of the flow that chooses the precision of the bundle's weights and rounds the model's."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from tide_export.bundle.manifest import BLOCK_SIZES, NETWORK_MATRICES, Quantization
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.errors import ConfigError, UnsupportedModelError
from tide_export.graph.rewriting import HALF
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.source import SourceModel
from tide_export.pipeline.request import AUTO, ExportRequest
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.fp8 import quantize_to_fp8
from tide_export.quantize.half import round_to_half
from tide_export.quantize.matrices import find_matrices
from tide_export.quantize.rounding import Rounding, round_for_tensorrt, round_to_nearest, round_with_scales_in
from tide_export.runtime.tensorrt.flavours import Flavour

logger = logging.getLogger("tide_export")

Lowering = Callable[[ir.Model], ir.Model]

QUANTIZATION_SEQUENCES = 64  # sequences for a calibrated quantization


def choose_weights(source: SourceModel, request: ExportRequest) -> ExportRequest:
    """Replaces `weights` "auto" by bf16 or fp16 if that is lossless, or else by fp32.

    The model's own integers stay integers and get the accuracy level.
    """
    if request.weights != AUTO:
        return request
    if request.accuracy_level is not None:
        if source.quantized is None or source.quantized.settings is None:
            raise ConfigError(f"{source.name} has no integers that are kept: --accuracy-level is for int8 and int4")
        settings = replace(source.quantized.settings, accuracy_level=request.accuracy_level)
        source.quantized = replace(source.quantized, settings=settings)
    if request.for_cuda and source.quantized is not None:
        _check_integers(source)
    otherwise = "fp16" if request.for_cuda else "fp32"
    return replace(request, weights=(*source.exact_in, otherwise)[0], accuracy_level=None)


def explain_weights(source: SourceModel, request: ExportRequest) -> None:
    """Logs why `choose_weights` chose 16 bits for `request`."""
    if request.weights == AUTO and source.exact_in:
        half = HALF[source.exact_in[0]].numpy()
        which = "the model's" if source.quantized is None else "the model's other"
        logger.info("%s weights are %s numbers and are stored as such (--weights fp32 for float32)", which, half)


def prepare_weights(source: SourceModel, request: ExportRequest) -> None:
    """Rounds the model's weights to the values that the bundle's graph will store."""
    if request.half is not None and request.half not in source.exact_in:
        round_to_half(source, request.half)
    settings = request.quantization_settings
    if request.flavour is None:
        if settings is not None:
            rounding: Rounding = round_to_nearest
            widest = 8
            if request.for_cuda:
                _refuse_experts(source, request)
                rounding = round_with_scales_in(HALF[request.network_weights(source.exact_in)].numpy())
                widest = 4  # its networks have one field of integers
            quantize_model(source, settings, quantization_text(source, request), rounding, widest=widest)
    elif request.weights in NETWORK_MATRICES:
        half = HALF[request.network_weights(source.exact_in)].numpy()
        _refuse_experts(source, request)
        _check_blocks(source, request.flavour, settings)
        text = quantization_text(source, request)
        if settings is None:
            quantize_to_fp8(source, text, half)
        else:
            quantize_model(source, settings, text, round_for_tensorrt(half), outside=False)


def lowering(source: SourceModel, request: ExportRequest, matrices: Mapping[str, np.ndarray] | None = None) -> Lowering:
    """Returns `lower_for_onnxruntime` for the weights and K/V types of `request`.

    Args:
        matrices: further matrices [out, in] by name, quantized like the model's, if those are.
    """
    quantized = source.quantized
    if quantized is not None and quantized.settings is not None and matrices:
        rounded = {name: round_to_nearest(matrix, quantized.settings) for name, matrix in matrices.items()}
        quantized = replace(quantized, blocks={**quantized.blocks, **rounded})
    return partial(
        lower_for_onnxruntime,
        quantized=quantized,
        half=request.half,
        kv_cache=request.config.kv_cache,
    )


def _check_integers(source: SourceModel) -> None:
    """Refuses a checkpoint's own integers, which are kept, for which the networks of CUDA have no field."""
    settings = None if source.quantized is None else source.quantized.settings
    if settings is not None and settings.bits != 4:
        raise UnsupportedModelError(
            f"{source.name} has integers of {settings.bits} bits, and target cuda takes those of 4: give --weights bf16"
        )


def _refuse_experts(source: SourceModel, request: ExportRequest) -> None:
    """Refuses quantized experts before the long quantization."""
    if any(find_matrices(source).experts):
        raise UnsupportedModelError(
            f"{source.architecture} has experts, which {request.network_target} takes in 16 bits or more alone, not in "
            f"{request.weights}: omit --weights"
        )


def _check_blocks(source: SourceModel, flavour: Flavour, settings: Quantization | None) -> None:
    """Refuses matrices that TensorRT does not take quantized, before the long quantization."""
    if settings is None:
        return
    matrices = find_matrices(source)
    columns = {matrix.columns: matrix.name for layer in matrices.linear for matrix in layer.values()}
    for count, name in columns.items():
        if count % settings.block_size:
            fitting = [size for size in BLOCK_SIZES if not any(count % size for count in columns)]
            advice = f"give --block-size {fitting[-1]}" if fitting else "use fp16 or bf16"
            raise ConfigError(
                f"blocks of {settings.block_size} do not divide the {count} columns of {name}, which "
                f"{flavour.name} needs: {advice}"
            )


def quantization_text(source: SourceModel, request: ExportRequest) -> list[list[int]]:
    """Returns token ids for a calibrated quantization, from the start of the routers' calibration text."""
    config = request.config
    if not request.reads_text_for_weights:
        return []
    length = min(config.calibration_length, source.context_length or config.calibration_length)
    count = min(config.calibration_samples, QUANTIZATION_SEQUENCES)
    tokenizer = load_tokenizer(request.model, request.trust_remote_code)
    sequences = read_sequences(config.calibration_dataset, tokenizer, length, count)
    return [sequence.ids.tolist() for sequence in sequences]
