"""Holds quantized matrices as ONNX Runtime's MatMulNBits and GatherBlockQuantized store them.

A row holds the weights of one output. It is cut into blocks; each block has one scale and, unless quantization is
symmetric, one zero point. An integer q represents (q - zero point) * scale. Layout: docs/ContribOperators.md of
microsoft/onnxruntime. Needs NumPy alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tide_export.bundle.manifest import SOURCE_INTEGERS, Quantization


@dataclass(frozen=True, eq=False)
class Blocks:
    """A quantized matrix of N rows and K columns; n = ceil(K / block size) blocks a row.

    Attributes:
        packed: uint8 [N, n, block size * bits / 8], the first of two 4-bit integers in the low half of its byte.
        scales: float32 [N, n].
        zeros: uint8 [N, ceil(n * bits / 8)], packed alike; None: 2 ** (bits - 1) everywhere.
        columns: K, of which the last R are second columns of outliers.
        bits: 4 or 8.
        outliers: the inputs that are multiplied by two columns, int64 [R]; None: each by one.
    """

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    columns: int
    bits: int
    outliers: np.ndarray | None = None

    @classmethod
    def from_integers(
        cls, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, settings: Quantization
    ) -> "Blocks":
        """Packs integers [N, K] with scales and zero points [N, n] (ignored where `settings` is symmetric)."""
        return cls(
            packed_rows(integers, settings.block_size, settings.bits),
            np.ascontiguousarray(scales, np.float32),
            None if settings.symmetric else pack(zeros.astype(np.uint8), settings.bits),
            integers.shape[1],
            settings.bits,
        )

    @property
    def rows(self) -> int:
        return len(self.packed)

    @property
    def symmetric(self) -> bool:
        """Whether it has no zero points."""
        return self.zeros is None

    @property
    def block_size(self) -> int:
        return self.packed.shape[2] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def signed(self) -> np.ndarray:
        """The integers of a matrix without zero points, int8 [N, K]."""
        integers = _unpack(self.packed, self.bits).reshape(self.rows, -1)[:, : self.columns]
        return integers.astype(np.int8) - np.int8(2 ** (self.bits - 1))

    @property
    def inputs(self) -> int:
        """The number of inputs it is multiplied by, K - R."""
        return self.columns - (0 if self.outliers is None else len(self.outliers))

    def zero_points(self) -> np.ndarray:
        """The integers that represent 0, float32 [N, n]."""
        if self.zeros is None:
            return np.full(self.scales.shape, 2 ** (self.bits - 1), np.float32)
        return _unpack(self.zeros, self.bits)[:, : self.scales.shape[1]].astype(np.float32)

    def values(self) -> np.ndarray:
        """Dequantizes the matrix, float32 [N, K - R]."""
        integers = _unpack(self.packed, self.bits).astype(np.float32)
        integers -= self.zero_points()[..., None]
        integers *= self.scales[..., None]
        values = integers.reshape(self.rows, -1)
        if self.outliers is not None:
            values[:, self.outliers] += values[:, self.inputs : self.columns]
        return np.ascontiguousarray(values[:, : self.inputs])

    def part(self, rows: slice) -> "Blocks":
        """Returns some of the rows."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, packed=self.packed[rows], scales=self.scales[rows], zeros=zeros)

    def split(self, rows: Sequence[int]) -> "list[Blocks]":
        """Cuts the matrix into parts with these numbers of rows."""
        return [self.part(slice(*ends)) for ends in pairwise(np.cumsum([0, *rows]))]


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A matrix of N rows and K columns in 8-bit floating point.

    Attributes:
        numbers: float8_e4m3fn [N, K].
        scale: of the matrix: a number x represents x * scale.
        input_scale: of what the matrix is multiplied by, where engines round that too.
    """

    numbers: np.ndarray
    scale: float
    input_scale: float

    @property
    def rows(self) -> int:
        return self.numbers.shape[0]

    @property
    def columns(self) -> int:
        return self.numbers.shape[1]

    def values(self) -> np.ndarray:
        """Dequantizes the matrix, float32 [N, K]."""
        return self.numbers.astype(np.float32) * np.float32(self.scale)


class IntegerMatrix(Protocol):
    """A quantized matrix with what `Blocks` has: that itself, or one of the model's own files."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def packed(self) -> np.ndarray: ...
    @property
    def scales(self) -> np.ndarray: ...
    @property
    def zeros(self) -> np.ndarray | None: ...
    @property
    def outliers(self) -> np.ndarray | None: ...
    def values(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """The quantized matrices of a model, which computes with their dequantized values.

    Attributes:
        settings: how they were quantized to integers; None: they are `Fp8Matrix`.
        blocks: by the name of the parameter; of experts, by `<parameter>.<expert>`.
    """

    settings: Quantization | None
    blocks: Mapping[str, IntegerMatrix | Fp8Matrix]

    @property
    def record(self) -> dict[str, Any] | None:
        """How they were quantized, for a router file; None: by the model's makers, so that they are as loaded."""
        if self.settings is None:
            return {"method": "fp8"}
        if self.settings.method == SOURCE_INTEGERS:
            return None
        return {name: value for name, value in asdict(self.settings).items() if value is not None}


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks to uint8 integers, 8 / bits times as many along the last axis."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def packed_rows(integers: np.ndarray, block_size: int, bits: int) -> np.ndarray:
    """Packs integers [N, K] as `Blocks.packed`.

    Padding of the last block is zero where there are no zero points.
    """
    rows, columns = integers.shape
    blocks = -(-columns // block_size)
    padded = np.full((rows, blocks * block_size), 2 ** (bits - 1), np.uint8)
    padded[:, :columns] = integers
    return pack(padded, bits).reshape(rows, blocks, -1)


def pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 integers [N, K], two of 4 bits in a byte; pads an odd number of integers with a 0."""
    if bits == 8:
        return np.ascontiguousarray(integers)
    if integers.shape[-1] % 2:
        integers = np.pad(integers, ((0, 0), (0, 1)))
    return integers[:, ::2] | (integers[:, 1::2] << 4)
