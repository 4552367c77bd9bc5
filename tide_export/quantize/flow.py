"""Quantizes a loaded model in place: it then computes with the values of integers in blocks.

Head and embedding get 8 bits: rounding them to 4 costs more perplexity than rounding a third of the layers. A head with
outlier columns (`quantize.outliers`) has 4, and a matrix of its own where it was tied to the embedding. With a budget,
`quantize.budget` chooses the bits of each matrix.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tide_export.bundle.manifest import Quantization
from tide_export.common.progress import stage
from tide_export.errors import UnsupportedModelError
from tide_export.model.quantized_weights import Blocks, QuantizedWeights
from tide_export.model.source import SourceModel
from tide_export.quantize.budget import choose_bits
from tide_export.quantize.gptq import compensate, head_hessian, quantize_layer, record_layer_inputs
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
    outliers, bits = dict[int, np.ndarray](), dict[int, int]()
    if settings.budget is not None:
        bits = choose_bits(source, settings, rounding)
    elif outside:
        outliers = find_outliers(source, settings)
        bits = dict.fromkeys(outliers, settings.bits)
    matrices = find_matrices(source)
    if not outside:
        matrices = replace(matrices, outside=[])
    total = len(matrices.all())
    if not total:
        raise UnsupportedModelError(f"{source.architecture} has no matrix that can be quantized")
    blocks: dict[str, Blocks] = {}
    errors: list[tuple[float, float]] = []
    with stage(f"quantizing the weights to {settings.bits} bits", total=total) as advance:

        def rounded(matrix: Matrix, otherwise: int = settings.bits) -> Blocks:
            how = replace(settings, bits=bits.get(id(matrix.parameter), otherwise))
            columns = outliers.get(id(matrix.parameter))
            if columns is None:
                return rounding(matrix.read(), how)
            return round_with_outliers(matrix.read(), columns, how, rounding)

        def round_all(group: Sequence[Matrix], otherwise: int = settings.bits) -> None:
            for matrix in group:
                before, blocks[matrix.name] = matrix.read(), rounded(matrix, otherwise)
                matrix.write(after := blocks[matrix.name].values())
                errors.append(_squares(before, after))
                advance(1)

        calibrated = settings.method == "gptq"
        head = [each for each in matrices.outside if calibrated and bits.get(id(each.parameter)) == settings.bits]
        round_all([each for each in matrices.outside if each not in head], OUTSIDE_BITS)
        texts = record_layer_inputs(source, sequences or ()) if calibrated else []
        for number, (layer, linear) in enumerate(zip(source.structure.layers, matrices.linear, strict=True)):
            round_all(matrices.experts[number])
            if calibrated:
                before = {matrix.name: matrix.read() for matrix in linear.values()}
                quantized = quantize_layer(layer, number, linear, texts, rounded)
                errors += [_squares(before[name], matrix.values()) for name, matrix in quantized.items()]
                blocks |= quantized
                advance(len(quantized))
            else:
                round_all(list(linear.values()))
        for matrix in head:
            old = matrix.read()
            blocks[matrix.name] = compensate(matrix, head_hessian(source, texts), rounded(matrix))
            matrix.write(after := blocks[matrix.name].values())
            errors.append(_squares(old, after))
            advance(1)
    if names := matrices.unquantized:
        logger.info("%d weights of the layers stay float32, such as %s", len(names), names[0])
    _log(blocks, errors)
    source.quantized = QuantizedWeights(settings, blocks)


def _log(blocks: Mapping[str, Blocks], errors: Sequence[tuple[float, float]]) -> None:
    """Logs what the matrices became, and how far from the original weights."""
    error, size = (sum(column) for column in zip(*errors, strict=True))
    logger.info("quantized %d matrices, which changed them by %.1f %%", len(blocks), 100 * (error / size) ** 0.5)
    kinds = [f"{b.bits} bits" + ("" if b.outliers is None else " and outlier columns") for b in blocks.values()]
    logger.info("%s", ", ".join(f"{count} of {kind}" for kind, count in sorted(Counter(kinds).items())))


def _squares(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Returns the sum of squared changes and the sum of squared original weights."""
    return float(np.square(after - before, dtype=np.float64).sum()), float(np.square(before, dtype=np.float64).sum())
