"""Rounds matrices to the nearest integers, for ONNX Runtime by its own kernel and for TensorRT."""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from tide_export.bundle.manifest import Quantization
from tide_export.model.quantized_weights import Blocks
from tide_export.quantize.matrices import ROWS

FACTORS = np.linspace(7.1, 8.9, 10, dtype=np.float32) / 8  # of the steps to the largest weight of a block

Rounding = Callable[[np.ndarray, Quantization], Blocks]


def round_to_nearest(weight: np.ndarray, settings: Quantization) -> Blocks:
    """Quantizes `weight`, float32 [N, K], with scales and zero points of ONNX Runtime's kernel.

    Without zero points, scales of 4 bits are those of `least_squares`, and all are rounded to float16, which halves
    their bytes when the model runs.
    """
    return _by_rows(weight, lambda rows: _nearest(rows, settings))


def _by_rows(weight: np.ndarray, rounded: Callable[[np.ndarray], Blocks]) -> Blocks:
    """Rounds `weight` some rows at a time, which takes little memory."""
    parts = [rounded(weight[first : first + ROWS]) for first in range(0, len(weight), ROWS)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        packed=np.concatenate([part.packed for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zeros=np.concatenate(zeros) if zeros else None,
    )


def _nearest(weight: np.ndarray, settings: Quantization) -> Blocks:
    from onnxruntime.capi import _pybind_state as kernels

    quantize = {4: kernels.quantize_matmul_4bits, 8: kernels.quantize_matmul_8bits}[settings.bits]
    rows, columns = weight.shape
    blocks = -(-columns // settings.block_size)
    padded = np.zeros((blocks * settings.block_size, rows), np.float32)  # [K, N], the kernel's layout
    padded[:columns] = weight.T
    packed = np.zeros((rows, blocks, settings.block_size * settings.bits // 8), np.uint8)
    scales = np.zeros((rows, blocks), np.float32)
    zeros = np.zeros((rows, -(-blocks * settings.bits // 8)), np.uint8)
    quantize(packed, padded, scales, zeros, settings.block_size, rows, columns, settings.symmetric)
    if not settings.symmetric:
        return Blocks(packed, scales, zeros, columns, settings.bits)
    if settings.bits == 4:
        scales = least_squares(padded.T.reshape(rows, blocks, settings.block_size), scales)
    return _rounded(weight, _float16(scales), settings)


def least_squares(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns scales [N, n] of smaller squared errors than `scales`, which make the largest weight -8.

    For integers that each of several scales gives, the best scale has a closed form (`make_qx_quants` of llama.cpp).

    Args:
        weights: float32 [N, n, block size].
    """
    found, best = scales, np.full(scales.shape, -1.0, np.float32)
    steps = np.divide(weights, scales[..., None], out=np.zeros_like(weights), where=scales[..., None] != 0)
    for factor in FACTORS:
        integers = np.clip(np.rint(steps * factor), -8, 7)
        products, squares = (np.einsum("nbk,nbk->nb", integers, other) for other in (weights, integers))
        scale = np.divide(products, squares, out=np.zeros_like(products), where=squares > 0)
        better = products * scale > best
        best, found = np.where(better, products * scale, best), np.where(better, scale, found)
    return found


def _float16(scales: np.ndarray) -> np.ndarray:
    """Rounds `scales` to float16, except those outside float16's normal range."""
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16).astype(np.float32)
    return np.where(np.abs(rounded - scales) <= np.abs(scales) / 2**11, rounded, scales)


def _rounded(weight: np.ndarray, scales: np.ndarray, settings: Quantization) -> Blocks:
    """Quantizes `weight` [N, K] without zero points with `scales` [N, blocks]."""
    zero = 2 ** (settings.bits - 1)
    scale = np.repeat(scales, settings.block_size, 1)[:, : weight.shape[1]]
    steps = np.divide(weight, scale, out=np.zeros_like(weight), where=scale != 0)
    integers = np.clip(np.rint(steps) + zero, 0, 2 * zero - 1).astype(np.uint8)
    return Blocks.from_integers(integers, scales, np.full_like(scales, zero), settings)


def round_with_scales_in(half: np.dtype) -> Rounding:
    """Returns `round_to_nearest`, without zero points, with scales that are numbers of type `half`."""

    def rounded(weight: np.ndarray, settings: Quantization) -> Blocks:
        scales = _nearest(weight, settings).scales
        return _rounded(weight, scales.astype(half).astype(np.float32), settings)

    return lambda weight, settings: _by_rows(weight, lambda rows: rounded(rows, settings))


def round_for_tensorrt(half: np.dtype) -> Rounding:
    """Returns a `Rounding` for TensorRT, which takes no zero points and only positive scales.

    ONNX Runtime's kernel gives a block a negative scale if its largest weight is positive.

    Args:
        half: dtype of the scales, in which TensorRT computes.
    """
    smallest = float(ml_dtypes.finfo(half).smallest_subnormal)

    def rounded(weight: np.ndarray, settings: Quantization) -> Blocks:
        rows, columns = weight.shape
        blocks = np.zeros((rows, -(-columns // settings.block_size) * settings.block_size), np.float32)
        blocks[:, :columns] = weight
        blocks = blocks.reshape(rows, -1, settings.block_size)
        top = 2 ** (settings.bits - 1)
        scales = np.maximum(blocks.max(2) / (top - 1), blocks.min(2) / -top)
        scales = np.maximum(scales, smallest).astype(half).astype(np.float32)
        integers = np.clip(np.rint(blocks / scales[..., None]), -top, top - 1) + top
        integers = integers.reshape(rows, -1)[:, :columns]
        return Blocks.from_integers(integers.astype(np.uint8), scales, np.full_like(scales, top), settings)

    return rounded
