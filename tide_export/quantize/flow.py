"""Quantizes a loaded model in place: it then computes with the values of integers in blocks.

With a budget, `quantize.budget` chooses the format of each matrix of layers and head. Without one, layers get the bits
of the settings, and the head has 8, as the embedding always does.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tide_export.bundle.manifest import Quantization
from tide_export.common.progress import stage
from tide_export.errors import UnsupportedModelError
from tide_export.model.quantized_weights import Blocks, QuantizedWeights
from tide_export.model.source import SourceModel
from tide_export.quantize.budget import Format, choose_formats
from tide_export.quantize.gptq import compensate, head_hessian, quantize_layer, record_layer_inputs
from tide_export.quantize.matrices import ROWS, Change, Matrix, find_matrices, refuse_offloaded
from tide_export.quantize.outliers import add_outliers
from tide_export.quantize.rounding import Rounding, round_to_nearest

logger = logging.getLogger("tide_export")

OUTSIDE_BITS = 8  # of the embedding, and of a head whose format is not chosen


def quantize_model(
    source: SourceModel,
    settings: Quantization,
    sequences: Sequence[Sequence[int]] | None = None,
    rounding: Rounding = round_to_nearest,
    outside: bool = True,
    widest: int = 8,
) -> None:
    """Quantizes the weights of `source` in place and sets `source.quantized`.

    `source.weights_sha256` stays the hash of the original weights.

    Args:
        sequences: token ids of texts, for method "gptq".
        rounding: chooses the scales.
        outside: quantize embedding and head too, and choose formats by the budget.
        widest: bits of the widest format that the budget may be spent on.

    Raises:
        CalibrationError: the texts do not reach every layer.
        ConfigError: some of the weights are not in memory.
        UnsupportedModelError: the model has no matrix that can be quantized.
    """
    refuse_offloaded(source, f"int{settings.bits}")
    formats: dict[int, Format] = {}
    if settings.budget is not None and outside:
        formats = choose_formats(source, settings, rounding, widest)
    matrices = find_matrices(source)
    if not outside:
        matrices = replace(matrices, outside=[])
    total = len(matrices.all())
    if not total:
        raise UnsupportedModelError(f"{source.architecture} has no matrix that can be quantized")
    blocks: dict[str, Blocks] = {}
    change = Change()
    with stage(f"quantizing the weights to {settings.bits} bits", total=total) as advance:

        def rounded(matrix: Matrix, otherwise: int = settings.bits) -> Blocks:
            chosen = formats.get(id(matrix.parameter))
            if chosen is None or chosen.bits != settings.bits:
                return rounding(matrix.read(), replace(settings, bits=chosen.bits if chosen else otherwise))
            if chosen.outliers is None:
                return chosen.rounded
            return add_outliers(chosen.rounded, matrix.read(), chosen.outliers, settings, rounding)

        def keep(matrix: Matrix, quantized: Blocks) -> None:
            blocks[matrix.name] = quantized
            for first in range(0, quantized.rows, ROWS):  # the values of a whole head take much memory
                matrix.write(quantized.part(slice(first, first + ROWS)).values(), change, first)
            advance(1)

        calibrated = settings.method == "gptq"
        fours = {parameter for parameter, chosen in formats.items() if chosen.bits == settings.bits}
        head = [each for each in matrices.outside if calibrated and id(each.parameter) in fours]
        for matrix in matrices.outside:
            if matrix not in head:
                keep(matrix, rounded(matrix, OUTSIDE_BITS))
        texts = record_layer_inputs(source, sequences or ()) if calibrated else []
        for number, (layer, linear) in enumerate(zip(source.structure.layers, matrices.linear, strict=True)):
            for matrix in matrices.experts[number]:
                keep(matrix, rounded(matrix))
            if calibrated:
                quantize_layer(layer, number, linear, texts, rounded, keep)
                continue
            for matrix in linear.values():
                keep(matrix, rounded(matrix))
        for matrix in head:
            keep(matrix, compensate(matrix, head_hessian(source, texts), rounded(matrix)))
    if names := matrices.unquantized:
        logger.info("%d weights of the layers stay float32, such as %s", len(names), names[0])
    logger.info("quantized %d matrices, which changed them by %.1f %%", len(blocks), 100 * change.relative)
    kinds = [f"{b.bits} bits" + ("" if b.outliers is None else " and outlier columns") for b in blocks.values()]
    logger.info("%s", ", ".join(f"{count} of {kind}" for kind, count in sorted(Counter(kinds).items())))
    source.quantized = QuantizedWeights(settings, blocks)
