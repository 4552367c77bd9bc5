"""A matrix in blocks of small integers, as ONNX Runtime's MatMulNBits and GatherBlockQuantized store it.

Rows are a product's outputs. Each row is cut into blocks; a block has one scale and, unless it is symmetric, one zero
point, and an integer q stands for (q - zero point) * scale. `round_to_nearest` lets ONNX Runtime's own kernel choose
and pack them. Layout: docs/ContribOperators.md of microsoft/onnxruntime. Needs numpy and onnxruntime alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tide_export.bundle.manifest import Quantization


@dataclass(frozen=True, eq=False)
class Blocks:
    """A quantized matrix of N rows and K columns; n = ceil(K / block size) blocks a row.

    Attributes:
        packed: uint8 [N, n, block size * bits / 8], the first of two 4-bit integers in the low half of its byte.
        scales: float32 [N, n].
        zeros: uint8 [N, ceil(n * bits / 8)], packed alike; None: 2 ** (bits - 1) everywhere.
        columns: K.
        bits: 4 or 8.
    """

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    columns: int
    bits: int

    @property
    def rows(self) -> int:
        return len(self.packed)

    @property
    def block_size(self) -> int:
        return self.packed.shape[2] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def values(self) -> np.ndarray:
        """What the integers stand for, float32 [N, K]."""
        integers = _unpack(self.packed, self.bits).astype(np.float32)
        if self.zeros is None:
            integers -= np.float32(2 ** (self.bits - 1))
        else:
            integers -= _unpack(self.zeros, self.bits)[:, : self.scales.shape[1], None].astype(np.float32)
        integers *= self.scales[..., None]
        return np.ascontiguousarray(integers.reshape(self.rows, -1)[:, : self.columns])


def round_to_nearest(weight: np.ndarray, settings: Quantization) -> Blocks:
    """`weight`, float32 [N, K], in blocks whose integers are nearest to it (ONNX Runtime's kernel)."""
    from onnxruntime.capi import _pybind_state as kernels

    quantize = {4: kernels.quantize_matmul_4bits, 8: kernels.quantize_matmul_8bits}[settings.bits]
    rows, columns = weight.shape
    blocks = -(-columns // settings.block_size)
    padded = np.zeros((blocks * settings.block_size, rows), np.float32)  # [K, N], as the kernel takes it
    padded[:columns] = weight.T
    packed = np.zeros((rows, blocks, settings.block_size * settings.bits // 8), np.uint8)
    scales = np.zeros((rows, blocks), np.float32)
    zeros = np.zeros((rows, -(-blocks * settings.bits // 8)), np.uint8)
    quantize(packed, padded, scales, zeros, settings.block_size, rows, columns, settings.symmetric)
    return Blocks(packed, scales, None if settings.symmetric else zeros, columns, settings.bits)


def from_integers(integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, settings: Quantization) -> Blocks:
    """Blocks of given integers [N, K], with scales and zero points [N, n] (ignored where `settings` is symmetric)."""
    rows, columns = integers.shape
    middle = 2 ** (settings.bits - 1)
    padded = np.full((rows, scales.shape[1] * settings.block_size), middle, np.uint8)
    padded[:, :columns] = integers
    return Blocks(
        _pack(padded, settings.bits).reshape(rows, scales.shape[1], -1),
        np.ascontiguousarray(scales, np.float32),
        None if settings.symmetric else _pack(zeros.astype(np.uint8), settings.bits),
        columns,
        settings.bits,
    )


def joined(parts: Sequence[Blocks]) -> Blocks:
    """The rows of `parts`, of equal columns and settings, below each other."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Blocks(
        np.concatenate([part.packed for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(zeros) if zeros else None,
        parts[0].columns,
        parts[0].bits,
    )


def split(whole: Blocks, rows: Sequence[int]) -> list[Blocks]:
    """Undoes `joined`: parts of so many rows each."""
    edges = np.cumsum([0, *rows])
    return [
        Blocks(
            whole.packed[start:stop],
            whole.scales[start:stop],
            None if whole.zeros is None else whole.zeros[start:stop],
            whole.columns,
            whole.bits,
        )
        for start, stop in pairwise(edges)
    ]


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint8 integers, 8 / bits times as many along the last axis."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Undoes `_unpack`; an odd last one gets 0 beside it."""
    if bits == 8:
        return np.ascontiguousarray(integers)
    if integers.shape[-1] % 2:
        integers = np.pad(integers, ((0, 0), (0, 1)))
    return integers[:, ::2] | (integers[:, 1::2] << 4)
