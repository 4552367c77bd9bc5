"""Holds matrices in 4-bit floating point (E2M1) as the model's files pack them.

Blocks of numbers have a scale each: of 32 a power of two (E8M0) in MXFP4 (OCP Microscaling Formats 1.0), of 16 a number
of E4M3, over one of the matrix, in NVFP4. They are integers of half the scale, from -12 to 12, so every operator for
symmetric integers in 8 bits multiplies by them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the number of each code of three bits; then the sign
E2M1 = np.concatenate([POSITIVE, -POSITIVE])
PAIRS = E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]  # the numbers of every byte
MXFP4_BLOCK = 32
EXPONENT_BIAS = 127
NOT_A_NUMBER = 255  # of E8M0


@dataclass(frozen=True, eq=False)
class Fp4Matrix(ABC):
    """A matrix of N rows and K columns, with the fields of `quantized_weights.Blocks` in 8 bits.

    Attributes:
        codes: uint8 [N, n, block size / 2], the first of two codes in the low half of its byte.
    """

    codes: np.ndarray

    bits = 8
    symmetric = True
    zeros = None
    outliers = None

    @property
    @abstractmethod
    def block_scales(self) -> np.ndarray:
        """The scale of each block, float32 [N, n]."""

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def block_size(self) -> int:
        return self.codes.shape[2] * 2

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * self.block_size

    @property
    def packed(self) -> np.ndarray:
        """Returns twice the numbers, plus 128."""
        return (2 * self._numbers() + 128).astype(np.uint8)

    @property
    def scales(self) -> np.ndarray:
        """Returns half the scales."""
        return self.block_scales * np.float32(0.5)

    def values(self) -> np.ndarray:
        """Dequantizes the matrix, float32 [N, K]."""
        return (self._numbers() * self.block_scales[..., None]).reshape(self.rows, self.columns)

    def _numbers(self) -> np.ndarray:
        return PAIRS[self.codes].reshape(*self.codes.shape[:2], self.block_size)


@dataclass(frozen=True, eq=False)
class Mxfp4Matrix(Fp4Matrix):
    """A matrix in MXFP4.

    Attributes:
        exponents: uint8 [N, n], each scale's exponent plus 127.
    """

    exponents: np.ndarray

    @property
    def block_scales(self) -> np.ndarray:
        return np.ldexp(np.float32(1), self.exponents.astype(np.int32) - EXPONENT_BIAS)


@dataclass(frozen=True, eq=False)
class Nvfp4Matrix(Fp4Matrix):
    """A matrix in NVFP4.

    Attributes:
        small_scales: float8_e4m3fn [N, n], as PyTorch has it.
        divisor: what every scale is divided by, float32 [1].
    """

    small_scales: torch.Tensor
    divisor: torch.Tensor

    @property
    def block_scales(self) -> np.ndarray:
        return (self.small_scales.float() / self.divisor.float()).numpy()
