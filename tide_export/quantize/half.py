"""Rounds a loaded model's matrices to bfloat16 or float16, which a bundle then stores without loss."""

import logging

import numpy as np
import torch

from tide_export.errors import ConfigError
from tide_export.model.source import HALF, SourceModel
from tide_export.quantize.matrices import Change, find_matrices, refuse_offloaded

logger = logging.getLogger("tide_export")


def round_to_half(source: SourceModel, weights: str) -> float:
    """Rounds the matrices of `source` in place; `source.weights_sha256` stays the original hash.

    Args:
        weights: "bf16" or "fp16".

    Returns:
        The relative error: the norm of the differences over the norm of the weights.

    Raises:
        ConfigError: some of the weights are not in memory, or a number is too large for the dtype.
    """
    half, name = HALF[weights], str(HALF[weights]).removeprefix("torch.")
    refuse_offloaded(source, weights)
    change = Change()
    for matrix in find_matrices(source).all():
        after = torch.from_numpy(matrix.read()).to(half).float().numpy()
        if not np.isfinite(after).all():
            raise ConfigError(f"weight {matrix.name} holds a number too large for {name}: use bf16 or fp32")
        matrix.write(after, change)
    logger.info("rounded the weights to %s, which changed them by %.2g %%", name, 100 * change.relative)
    return change.relative
