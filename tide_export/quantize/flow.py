"""Quantizes a loaded model in place: it then computes with the values of integers in blocks.

Head and embedding get 8 bits: rounding them to 4 costs more perplexity than rounding a third of the layers. A head with
outlier columns (`quantize.outliers`) has 4, and a matrix of its own where it was tied to the embedding.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tide_export.bundle.manifest import Quantization
from tide_export.common.progress import stage
from tide_export.errors import UnsupportedModelError
from tide_export.model.quantized_weights import Blocks, QuantizedWeights
from tide_export.model.source import SourceModel
from tide_export.quantize.gptq import quantize_layer, record_layer_inputs
from tide_export.quantize.matrices import Matrix, find_matrices
from tide_export.quantize.outliers import find_outliers, round_with_outliers
from tide_export.quantize.rounding import Rounding, round_to_nearest

logger = logging.getLogger("tide_export")

OUTSIDE_BITS = 8  # of the embedding, and of a head without outlier columns


def quantize_model(
    source: SourceModel,
    settings: Quantization,
    sequences: Sequence[Sequence[int]] | None = None,
    rounding: Rounding = round_to_nearest,
    outside: bool = True,
) -> None:
    """Quantizes the weights of `source` in place and sets `source.quantized`.

    `source.weights_sha256` stays the hash of the original weights.

    Args:
        sequences: token ids of texts, for method "gptq".
        rounding: chooses the scales.
        outside: quantize embedding and head too, and give matrices outlier columns.

    Raises:
        CalibrationError: the texts do not reach every layer.
        UnsupportedModelError: the model has no matrix that can be quantized.
    """
    outliers = find_outliers(source, settings) if outside else {}
    matrices = find_matrices(source)
    if not outside:
        matrices = replace(matrices, outside=[])
    total = len(matrices.all())
    if not total:
        raise UnsupportedModelError(f"{source.architecture} has no matrix that can be quantized")
    blocks: dict[str, Blocks] = {}
    errors: list[tuple[float, float]] = []
    with stage(f"quantizing the weights to {settings.bits} bits", total=total) as advance:

        def rounded(matrix: Matrix, settings: Quantization = settings) -> Blocks:
            columns = outliers.get(id(matrix.parameter))
            if columns is None:
                return rounding(matrix.read(), settings)
            return round_with_outliers(matrix.read(), columns, settings, rounding)

        def round_all(group: Sequence[Matrix], settings: Quantization) -> None:
            for matrix in group:
                before, blocks[matrix.name] = matrix.read(), rounded(matrix, settings)
                matrix.write(after := blocks[matrix.name].values())
                errors.append(_squares(before, after))
                advance(1)

        for matrix in matrices.outside:
            whole = id(matrix.parameter) in outliers
            round_all([matrix], settings if whole else replace(settings, bits=OUTSIDE_BITS))
        texts = record_layer_inputs(source, sequences or ()) if settings.method == "gptq" else []
        for number, (layer, linear) in enumerate(zip(source.structure.layers, matrices.linear, strict=True)):
            round_all(matrices.experts[number], settings)
            if settings.method == "gptq":
                before = {matrix.name: matrix.read() for matrix in linear.values()}
                quantized = quantize_layer(layer, number, linear, texts, rounded)
                errors += [_squares(before[name], matrix.values()) for name, matrix in quantized.items()]
                blocks |= quantized
                advance(len(quantized))
            else:
                round_all(list(linear.values()), settings)
    if names := matrices.unquantized:
        logger.info("%d weights of the layers stay float32, such as %s", len(names), names[0])
    error, size = (sum(column) for column in zip(*errors, strict=True))
    logger.info("quantized %d matrices, which changed them by %.1f %%", len(blocks), 100 * (error / size) ** 0.5)
    source.quantized = QuantizedWeights(settings, blocks)


def _squares(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Returns the sum of squared changes and the sum of squared original weights."""
    return float(np.square(after - before, dtype=np.float64).sum()), float(np.square(before, dtype=np.float64).sum())
