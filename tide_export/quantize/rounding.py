"""Rounds matrices to the nearest integers with ONNX Runtime's own kernel."""

import numpy as np

from tide_export.bundle.manifest import Quantization
from tide_export.model.quantized_weights import Blocks


def round_to_nearest(weight: np.ndarray, settings: Quantization) -> Blocks:
    """Quantizes `weight`, float32 [N, K]; the kernel chooses scales and zero points and packs the integers."""
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
    return Blocks(packed, scales, None if settings.symmetric else zeros, columns, settings.bits)
