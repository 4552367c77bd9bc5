"""Rounds a model's linear layers to FP8 (E4M3) with one scale per matrix, as ModelOpt does.

Engines round the inputs of these layers too, with scales from the largest input on a text; the model itself, and so
the bundle's graph, computes with unrounded inputs.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import torch
from torch import nn

from tide_export.common.progress import stage
from tide_export.errors import CalibrationError, UnsupportedModelError
from tide_export.model.quantized_weights import Fp8Matrix, QuantizedWeights
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import Change, Matrix, find_matrices, refuse_offloaded

logger = logging.getLogger("tide_export")

LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448


def quantize_to_fp8(source: SourceModel, sequences: Sequence[Sequence[int]], half: np.dtype) -> None:
    """Rounds the linear layers of `source` in place and sets `source.quantized`.

    `source.weights_sha256` stays the hash of the original weights.

    Args:
        sequences: token ids of texts, whose hidden states determine the input scales.
        half: dtype of the scales, in which TensorRT computes.

    Raises:
        CalibrationError: the texts do not reach every layer.
        UnsupportedModelError: the model has no linear layer that can be quantized.
        ConfigError: some of the weights are not in memory.
    """
    refuse_offloaded(source, "fp8")
    linear = {module: matrix for layer in find_matrices(source).linear for module, matrix in layer.items()}
    if not linear:
        raise UnsupportedModelError(f"{source.architecture} has no matrix that can be quantized")
    largest = _largest_inputs(source, linear, sequences)
    blocks = {}
    with stage("rounding the weights to FP8", total=len(linear)) as advance:
        for module, matrix in linear.items():
            if not np.isfinite(largest[module]) or largest[module] == 0:
                raise CalibrationError(f"the text does not reach {matrix.name}, or overflows there: give other text")
            blocks[matrix.name] = _rounded(matrix, half, _scale(largest[module], half), Change())
            advance(1)
    source.quantized = QuantizedWeights(None, blocks)


def round_to_fp8(source: SourceModel, half: np.dtype) -> float:
    """Rounds the linear layers of `source` in place as `quantize_to_fp8` does, without input scales.

    Returns:
        The relative error: the norm of the differences over the norm of the weights.
    """
    change = Change()
    for layer in find_matrices(source).linear:
        for matrix in layer.values():
            _rounded(matrix, half, 1.0, change)
    return change.relative


def _rounded(matrix: Matrix, half: np.dtype, input_scale: float, change: Change) -> Fp8Matrix:
    """Rounds `matrix` in place, adds how far to `change`, and returns its E4M3 numbers with their scale."""
    weight = matrix.read()
    scale = _scale(float(np.abs(weight).max(initial=0)), half)
    numbers = np.clip(weight / np.float32(scale), -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    rounded = Fp8Matrix(numbers, scale, input_scale)
    matrix.write(rounded.values(), change)
    return rounded


def _scale(largest: float, half: np.dtype) -> float:
    """Returns the positive scale, representable in `half`, that maps `largest` to E4M3's largest number."""
    return float(np.array(max(largest / LARGEST, ml_dtypes.finfo(half).tiny)).astype(half))


@torch.no_grad()
def _largest_inputs(
    source: SourceModel, linear: dict[nn.Module, Matrix], sequences: Sequence[Sequence[int]]
) -> dict[nn.Module, float]:
    """Returns the largest absolute input of each module; 0 if no text reaches it."""
    largest = dict.fromkeys(linear, 0.0)

    def record(module: nn.Module, args: tuple) -> None:
        largest[module] = float(np.maximum(largest[module], float(args[0].abs().max())))  # unlike max(), keeps a NaN

    with ExitStack() as hooks:
        for module in linear:
            hooks.enter_context(module.register_forward_pre_hook(record))
        for ids in sequences:
            source.raw_hidden(torch.tensor([list(ids)], device=source.device), [])
    return largest
