"""Adds second columns to matrices of 4 bits, which hold what rounding outlier columns leaves.

In language models a few inputs of a matrix are much larger than the others, and an error of their columns counts most
(LLM.int8(), Dettmers et al., https://arxiv.org/abs/2208.07339; OWQ, Lee et al., https://arxiv.org/abs/2306.02272). Two
columns of 4 bits round like one of 8. `quantize.budget` chooses the columns.
"""

from dataclasses import replace

import numpy as np

from tide_export.bundle.manifest import INT8_MATMULS, Quantization
from tide_export.model.quantized_weights import Blocks
from tide_export.quantize.matrices import ROWS
from tide_export.quantize.rounding import Rounding

MIN_COLUMNS = 256  # narrower matrices get none
SHARES = (32, 16, 8)  # one column of so many is an outlier


def can_have(columns: int, settings: Quantization) -> bool:
    """Returns whether a matrix with so many columns may have outliers.

    The runtime's own operators take them in whole blocks, beside whole blocks: no zero points, inputs in 8 bits.
    """
    own = settings.bits == 4 and settings.symmetric and settings.accuracy_level == INT8_MATMULS
    return own and columns >= max(MIN_COLUMNS, 4 * settings.block_size) and columns % settings.block_size == 0


def outlier_count(columns: int, settings: Quantization, share: int) -> int:
    """Returns how many of `columns` are outliers where one of `share` is, which fill whole blocks."""
    return settings.block_size * max(1, columns // (share * settings.block_size))


def add_outliers(
    first: Blocks, weight: np.ndarray, outliers: np.ndarray, settings: Quantization, rounding: Rounding
) -> Blocks:
    """Adds second columns for `outliers`, int64 [R], to a matrix in 4 bits.

    Args:
        first: `weight`, float32 [N, K], in 4 bits.
    """
    parts = (first.part(slice(row, row + ROWS)) for row in range(0, first.rows, ROWS))
    left = weight[:, outliers] - np.concatenate([part.values()[:, outliers] for part in parts])
    second = rounding(np.ascontiguousarray(left), settings)
    return replace(
        first,
        packed=np.concatenate([first.packed, second.packed], 1),
        scales=np.concatenate([first.scales, second.scales], 1),
        columns=first.columns + second.columns,
        outliers=outliers,
    )
