"""Quantizes a loaded model: its matrices become blocks, and the model computes with what the blocks stand for."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tide_export.bundle.manifest import Quantization
from tide_export.errors import UnsupportedModelError
from tide_export.model.quantized_weights import Blocks, QuantizedWeights
from tide_export.model.source import SourceModel
from tide_export.progress import stage
from tide_export.quantize.gptq import enter_layers, quantize_layer, require_gptq
from tide_export.quantize.matrices import Matrix, find_matrices
from tide_export.quantize.rounding import round_to_nearest

logger = logging.getLogger("tide_export")


def quantize_model(
    source: SourceModel, settings: Quantization, sequences: Sequence[Sequence[int]] | None = None
) -> SourceModel:
    """`source` with quantized weights, changed in place; its `weights_sha256` stays that of the weights it had.

    Args:
        sequences: texts as token ids, for a method that is calibrated.

    Raises:
        ConfigError: the method is not installed.
        CalibrationError: the texts do not reach every layer.
        UnsupportedModelError: the model has no matrix that can be quantized.
    """
    if settings.method == "gptq":
        require_gptq()
    matrices = find_matrices(source)
    if not len(matrices):
        raise UnsupportedModelError(f"{source.architecture} has no matrix that can be quantized")
    blocks: dict[str, Blocks] = {}
    errors: list[tuple[float, float]] = []
    with stage(f"quantizing the weights to {settings.bits} bits", total=len(matrices)) as advance:

        def round_all(some: Sequence[Matrix]) -> None:
            for matrix in some:
                before = matrix.read()
                blocks[matrix.name] = round_to_nearest(before, settings)
                matrix.write(after := blocks[matrix.name].values())
                errors.append(_squares(before, after))
                advance(1)

        round_all(matrices.around)
        texts = enter_layers(source, sequences or ()) if settings.method == "gptq" else []
        for number, (layer, products) in enumerate(zip(source.structure.layers, matrices.products, strict=True)):
            round_all(matrices.experts[number])
            if settings.method == "gptq":
                before = {matrix.name: matrix.read() for matrix in products.values()}
                found = quantize_layer(layer, number, products, texts, settings)
                errors += [_squares(before[name], made.values()) for name, made in found.items()]
                blocks |= found
                advance(len(found))
            else:
                round_all(list(products.values()))
    if matrices.left:
        logger.info("%d weights of the layers stay float32, such as %s", len(matrices.left), matrices.left[0])
    error, size = (sum(column) for column in zip(*errors, strict=True))
    logger.info("quantized %d matrices, which changed them by %.1f %%", len(blocks), 100 * (error / size) ** 0.5)
    return replace(source, quantized=QuantizedWeights(settings, blocks))


def _squares(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Sum of squares of what quantizing changed, and of what was there."""
    return float(np.square(after - before, dtype=np.float64).sum()), float(np.square(before, dtype=np.float64).sum())
