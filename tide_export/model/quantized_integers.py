"""Converts integer matrices of packed models for ONNX Runtime's matmuls.

They are integers packed into int32 words, with a scale and a zero point per group of inputs. `SourceMatrix` cuts
its rows into blocks, as `quantized_weights.Blocks`, without rounding: no number is computed, scales are widened to
float32, and a group longer than a block has its scale in each.

Formats: GPTQ, https://arxiv.org/abs/2210.17323, as AutoGPTQ and GPTQModel store it (`gptq` and `gptq_v2`); AWQ,
https://arxiv.org/abs/2306.00978, as AutoAWQ stores it (`gemm`); compressed-tensors' `pack-quantized`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
import torch

from tide_export.bundle.manifest import BLOCK_SIZES
from tide_export.model.quantized_weights import pack, packed_rows

WORD = 32  # bits of the integers that hold packed ones
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each of a word's eight nibbles, lowest nibble first


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """Holds a quantized matrix [K, N].

    Its values are `scales[g, j] * (values[i, j] - zeros[g, j])`, where g = groups[i].

    Attributes:
        words: int32, the integers as the model's files pack them.
        unpacked: gives `values` of `words`.
        bits: of an integer, 1 to 8.
        scales: floating point [G, N].
        zeros: int16 [G, N].
        groups: int64 [K], the group of each input.
    """

    words: torch.Tensor
    unpacked: Callable[[torch.Tensor], torch.Tensor]
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""
        return len(self.groups), self.words.numel() * WORD // self.bits // len(self.groups)

    @property
    def values(self) -> torch.Tensor:
        """The integers, uint8 [K, N], inputs by outputs."""
        return self.unpacked(self.words)

    def dequantize(self) -> torch.Tensor:
        """Computes the matrix, float32 [K, N]."""
        dense, zeros, scales = self.values.float(), self.zeros.float(), self.scales.float()
        count = int(self.groups.max()) + 1
        if torch.equal(self.groups, consecutive(len(dense), len(dense) // count)):  # then nothing is gathered
            by_group = dense.view(count, -1, dense.shape[1])
            by_group -= zeros[:count, None]
            by_group *= scales[:count, None]
            return dense
        dense -= zeros[self.groups]
        dense *= scales[self.groups]
        return dense


@dataclass(frozen=True, eq=False)
class SourceMatrix:
    """Holds a matrix of N rows and K columns as the model's files pack it.

    The fields of `Blocks` are made on access.

    Attributes:
        weight: the integers.
        block_size: weights of a block, at most `block_size_of` the weight.
        symmetric: no zero points: all are `is_symmetric`.
    """

    weight: IntegerWeight
    block_size: int
    symmetric: bool

    @property
    def rows(self) -> int:
        return self.weight.shape[1]

    @property
    def columns(self) -> int:
        return self.weight.shape[0]

    @property
    def bits(self) -> int:
        return self.weight.bits

    @property
    def outliers(self) -> None:
        """None: no input is multiplied by two columns."""
        return None

    @cached_property
    def order(self) -> np.ndarray | None:
        """Returns the input that each column of `packed` multiplies, int64 [K].

        None: they are in the model's order.
        """
        groups = self.weight.groups
        return None if bool((groups.diff() >= 0).all()) else groups.argsort(stable=True).numpy()

    @property
    def packed(self) -> np.ndarray:
        """Returns `Blocks.packed`, columns in `order`."""
        integers = self.weight.values.T.numpy()
        return packed_rows(integers if self.order is None else integers[:, self.order], self.block_size, self.bits)

    @property
    def scales(self) -> np.ndarray:
        """Returns `Blocks.scales`."""
        return self.weight.scales[self._groups].float().T.contiguous().numpy()

    @property
    def zeros(self) -> np.ndarray | None:
        """Returns `Blocks.zeros`."""
        if self.symmetric:
            return None
        return pack(self.weight.zeros[self._groups].to(torch.uint8).T.numpy(), self.bits)

    @property
    def _groups(self) -> torch.Tensor:
        """The group of each block."""
        return self.weight.groups.sort().values[:: self.block_size]

    def values(self) -> np.ndarray:
        """Dequantizes the matrix, float32 [N, K], columns in the model's order."""
        return self.weight.dequantize().T.contiguous().numpy()


def block_size_of(weight: IntegerWeight) -> int | None:
    """Returns the largest block that lies in one group wherever it is.

    None if the matmuls take none such, or not the bits.
    """
    sizes = weight.groups.unique(return_counts=True)[1]
    begins = sizes.cumsum(0)[:-1].tolist()
    size = gcd(BLOCK_SIZES[-1], *begins) if begins else max(gcd(BLOCK_SIZES[-1], len(weight.groups)), BLOCK_SIZES[0])
    return size if weight.bits in (4, 8) and size in BLOCK_SIZES else None


def is_symmetric(weight: IntegerWeight) -> bool:
    """Returns whether every zero point is 2 ** (bits - 1)."""
    return bool((weight.zeros[weight.groups.unique()] == 2 ** (weight.bits - 1)).all())


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpacks unsigned integers of `bits` bits (1 to 8) to uint8.

    They are in int32 `words` along `dim`, lowest bits first.

    They are dense: where `bits` does not divide 32, a number may begin in one word and end in the next.
    """
    moved = words.movedim(dim, 0)
    period, count = bits // gcd(bits, WORD), WORD // gcd(bits, WORD)  # `count` numbers fill `period` words
    blocks = moved.reshape(-1, period, *moved.shape[1:])
    mask = (1 << bits) - 1
    numbers = torch.empty((blocks.shape[0], count, *moved.shape[1:]), dtype=torch.uint8)
    for index in range(count):
        word, shift = divmod(index * bits, WORD)
        number = (blocks[:, word] >> shift) & (mask if shift + bits <= WORD else (1 << (WORD - shift)) - 1)
        if shift + bits > WORD:
            number = number | (blocks[:, word + 1] << (WORD - shift)) & mask
        numbers[:, index] = number
    return numbers.reshape(-1, *moved.shape[1:]).movedim(0, dim)


def read_gptq(parts: dict[str, torch.Tensor], bits: int, group_size: int, first_version: bool) -> IntegerWeight:
    """Reads a matrix in GPTQ's format.

    Args:
        parts: qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales [G, N] and g_idx int32 [K] (by
            default, groups of consecutive inputs).
        first_version: zeros are stored less one, modulo the number of values (`gptq`), or unchanged (`gptq_v2`).
    """
    zeros = unpack(parts["qzeros"], bits, dim=1).to(torch.int16)
    if first_version:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    inputs = len(parts["qweight"]) * WORD // bits
    groups = parts["g_idx"].long() if "g_idx" in parts else consecutive(inputs, group_size)
    return IntegerWeight(
        parts["qweight"], lambda words: unpack(words, bits, dim=0), bits, parts["scales"], zeros, groups
    )


def read_awq(parts: dict[str, torch.Tensor], group_size: int) -> IntegerWeight:
    """Reads a matrix in AWQ's `gemm` format.

    qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N].
    """
    words, zeros = parts["qweight"], _awq_columns(parts["qzeros"]).to(torch.int16)
    return IntegerWeight(words, _awq_columns, 4, parts["scales"], zeros, consecutive(len(words), group_size))


def read_compressed(parts: dict[str, torch.Tensor], bits: int, group_size: int) -> IntegerWeight:
    """Reads a matrix in the format `pack-quantized` of compressed-tensors.

    Args:
        parts: weight_packed int32 [N, K * bits / 32], weight_scale [N, G], weight_zero_point int32 [N * bits / 32, G]
            (by default the middle of the integers) and weight_g_idx int32 [K] (by default, groups of consecutive
            inputs).
    """
    words, scales = parts["weight_packed"], parts["weight_scale"].T
    inputs, middle = words.shape[1] * WORD // bits, 2 ** (bits - 1)
    zeros = torch.full(scales.shape, middle, dtype=torch.int16)
    if "weight_zero_point" in parts:
        zeros = unpack(parts["weight_zero_point"], bits, dim=0)[: len(words)].T.to(torch.int16)
    groups = parts["weight_g_idx"].long() if "weight_g_idx" in parts else torch.tensor([-1])
    if bool((groups < 0).any()):
        groups = consecutive(inputs, group_size)
    return IntegerWeight(words, lambda words: unpack(words, bits, dim=1).T, bits, scales, zeros, groups)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    stored = unpack(words, 4, dim=1).reshape(len(words), -1, len(AWQ_ORDER))
    return stored[:, :, torch.tensor(AWQ_ORDER).argsort()].reshape(len(words), -1)


def consecutive(inputs: int, group_size: int) -> torch.Tensor:
    """Returns the group of each input; a size of -1 is one group for all."""
    return torch.arange(inputs) // (group_size if group_size > 0 else inputs)
