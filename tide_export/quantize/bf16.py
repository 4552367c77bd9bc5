"""Rounds a loaded model's matrices to bfloat16 numbers, which a bundle then stores without loss."""

import logging

import numpy as np
import torch

from tide_export.errors import ConfigError
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import find_matrices

logger = logging.getLogger("tide_export")


def round_to_bf16(source: SourceModel) -> float:
    """Rounds the matrices of `source` in place; `weights_sha256` keeps the original hash.

    Returns:
        The relative error: the root of the squared differences over the squared weights.

    Raises:
        ConfigError: some of the model's weights are not in memory.
    """
    if any(parameter.is_meta for parameter in source.model.parameters()):
        raise ConfigError(
            f"weights bf16: those of {source.name} are not bfloat16 numbers, and are rounded only where all are in "
            "memory: omit --device-map, or give --weights fp32"
        )
    squared_error = squared = 0.0
    for matrix in find_matrices(source).all():
        before = matrix.read()
        after = torch.from_numpy(before).bfloat16().float().numpy()
        squared_error += float(np.square(after - before, dtype=np.float64).sum())
        squared += float(np.square(before, dtype=np.float64).sum())
        matrix.write(after)
    error = (squared_error / squared) ** 0.5 if squared else 0.0
    logger.info("rounded the weights to bfloat16, which changed them by %.2g %%", 100 * error)
    return error
