"""Holds the experts of a layer, one parameter, as the model's files pack them.

They are in MXFP4, as gpt-oss has them, or integers of GPTQ, AWQ or compressed-tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.model.fp4_matrices import MXFP4_BLOCK, Mxfp4Matrix
from tide_export.model.quantized_integers import IntegerWeight, SourceMatrix, block_size_of, is_symmetric


@dataclass(frozen=True, eq=False)
class Mxfp4Experts:
    """The matrices of all experts, which the model holds as [E, K, N].

    Attributes:
        codes, exponents: those of every `Mxfp4Matrix`, uint8 [E, N, K / 32, 16] and [E, N, K / 32].
    """

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the model's parameter."""
        experts, rows, blocks, _ = self.codes.shape
        return experts, blocks * MXFP4_BLOCK, rows

    @property
    def matrices(self) -> list[Mxfp4Matrix]:
        both = zip(self.codes.numpy(), self.exponents.numpy(), strict=True)
        return [Mxfp4Matrix(codes, exponents) for codes, exponents in both]

    def dequantize(self) -> torch.Tensor:
        """Computes the parameter, float32."""
        dense = torch.empty(self.shape)
        for expert, matrix in enumerate(self.matrices):
            dense[expert] = torch.from_numpy(matrix.values()).T
        return dense


@dataclass(frozen=True, eq=False)
class JoinedMatrix:
    """Matrices of the same inputs whose rows are one matrix, with the fields of `Blocks`."""

    parts: Sequence[SourceMatrix]

    outliers = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def bits(self) -> int:
        return self.parts[0].bits

    @property
    def block_size(self) -> int:
        return self.parts[0].block_size

    @property
    def symmetric(self) -> bool:
        return self.parts[0].symmetric

    @property
    def packed(self) -> np.ndarray:
        return np.concatenate([part.packed for part in self.parts])

    @property
    def scales(self) -> np.ndarray:
        return np.concatenate([part.scales for part in self.parts])

    @property
    def zeros(self) -> np.ndarray | None:
        zeros = [part.zeros for part in self.parts if part.zeros is not None]
        return np.concatenate(zeros) if zeros else None

    def values(self) -> np.ndarray:
        """Dequantizes the matrix, float32 [N, K]."""
        return np.concatenate([part.values() for part in self.parts])


@dataclass(frozen=True, eq=False)
class IntegerExperts:
    """The matrices of all experts, which the model holds as [E, N, K].

    Attributes:
        experts: for every expert, matrices whose rows are one after the other (gate and up).
    """

    experts: Sequence[Sequence[IntegerWeight]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the model's parameter."""
        first = self.experts[0]
        return len(self.experts), sum(weight.shape[1] for weight in first), first[0].shape[0]

    @property
    def weights(self) -> list[IntegerWeight]:
        return [weight for parts in self.experts for weight in parts]

    @property
    def is_kept(self) -> bool:
        """Returns whether operators multiply by them: blocks that fit, and inputs in the model's order."""
        in_order = all(bool((weight.groups.diff() >= 0).all()) for weight in self.weights)
        return in_order and all(block_size_of(weight) is not None for weight in self.weights)

    def matrices(self, block_size: int) -> list[JoinedMatrix]:
        symmetric = all(map(is_symmetric, self.weights))
        return [
            JoinedMatrix([SourceMatrix(weight, block_size, symmetric) for weight in parts]) for parts in self.experts
        ]

    def dequantize(self) -> torch.Tensor:
        """Computes the parameter, float32."""
        dense = torch.empty(self.shape)
        for expert, parts in zip(dense, self.experts, strict=True):
            torch.cat([weight.dequantize().T for weight in parts], out=expert)
        return dense
