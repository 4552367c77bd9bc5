"""Finds the columns that multiply the largest inputs, and stores what rounding leaves of them.

In language models a few inputs of a matrix are much larger than the others, and an error of their columns counts most
(LLM.int8(), Dettmers et al., https://arxiv.org/abs/2208.07339; OWQ, Lee et al., https://arxiv.org/abs/2306.02272). A
second column of 4 bits holds what rounding such an outlier column leaves: two columns of 4 bits round like one of 8.

The inputs are measured on random tokens, so no text is needed.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tide_export.bundle.manifest import INT8_MATMULS, Quantization
from tide_export.common.progress import stage
from tide_export.model.quantized_weights import Blocks
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import find_matrices, input_sums, own_head
from tide_export.quantize.rounding import Rounding

MIN_COLUMNS = 256  # narrower matrices get none
LAYER_SHARE, HEAD_SHARE = 16, 8  # one column of so many is an outlier
SEQUENCES, LENGTH, BATCH = 32, 32, 8  # of random tokens
FIRST = 4  # position of the first input that is measured; those before are unlike all others


def find_outliers(source: SourceModel, settings: Quantization) -> dict[int, np.ndarray]:
    """Returns the outlier columns of linear layers and head, int64 [R], by `id` of the parameter.

    Only matrices of the runtime's own operator have some: of 4 bits, without zero points, at the level of 8-bit inputs.
    The head then has a matrix of its own.
    """
    if settings.bits != 4 or not settings.symmetric or settings.accuracy_level != INT8_MATMULS:
        return {}
    head = source.model.get_output_embeddings()
    wide: dict[nn.Module, int] = {
        module: LAYER_SHARE
        for layer in find_matrices(source).linear
        for module, matrix in layer.items()
        if can_have(matrix.columns, settings)
    }
    if type(head) is nn.Linear and can_have(head.in_features, settings) and head.in_features == source.normalized_size:
        own_head(source)
        wide[head] = HEAD_SHARE
    if not wide:
        return {}
    measured = measure_inputs(source, wide)
    return {id(module.weight): largest(found, settings, wide[module]) for module, found in measured.items()}


def can_have(columns: int, settings: Quantization) -> bool:
    """Returns whether a matrix of so many columns is wide enough, and they are whole blocks."""
    return columns >= max(MIN_COLUMNS, 4 * settings.block_size) and columns % settings.block_size == 0


@torch.no_grad()
def measure_inputs(source: SourceModel, modules: Collection[nn.Module]) -> dict[nn.Module, np.ndarray]:
    """Runs the model on random tokens and sums the squares of the inputs of each module.

    Returns:
        A module that ran -> the sums, [K].
    """
    head = source.model.get_output_embeddings()
    with (
        input_sums([module for module in modules if module is not head], squares) as sums,
        stage("measuring the inputs of the matrices", total=SEQUENCES // BATCH) as advance,
    ):
        for ids in random_tokens(source).split(BATCH):
            raw = source.raw_hidden(ids.to(source.device), [source.num_layers])[source.num_layers]
            if head in modules:
                sums[head] = sums.get(head, torch.zeros(())) + squares(source.normalize(raw))
            advance(1)
    return {module: found.numpy() for module, found in sums.items()}


def squares(states: torch.Tensor) -> torch.Tensor:
    """Returns the sums of squares of states [B, S, K] from `FIRST` on, or of experts' [T, K], float64 [K]."""
    rows = states[:, FIRST:] if states.ndim > 2 else states
    return rows.detach().flatten(0, -2).double().square().sum(0).cpu()


def random_tokens(source: SourceModel) -> torch.Tensor:
    """Returns token ids [SEQUENCES, LENGTH or less] without those that may stand for an image.

    These are the ones that the config names.
    """
    length = min(LENGTH, source.context_length or LENGTH)
    ids = torch.randint(source.vocab_size, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    configs = (source.model.config.to_dict(), source.text_config.to_dict())
    named = {value for config in configs for value in config.values() if isinstance(value, int)}
    other = next(token for token in range(source.vocab_size) if token not in named)
    return torch.where(torch.isin(ids, torch.tensor(sorted(named))), other, ids)


def largest(squares: np.ndarray, settings: Quantization, share: int) -> np.ndarray:
    """Returns the ascending numbers of the outlier columns, int64 [R], which fill whole blocks.

    Args:
        squares: sums of squares of the inputs, [K].
        share: one column of so many is an outlier.
    """
    count = settings.block_size * max(1, len(squares) // (share * settings.block_size))
    return np.sort(np.argsort(-squares, kind="stable")[:count]).astype(np.int64)


def round_with_outliers(weight: np.ndarray, outliers: np.ndarray, settings: Quantization, rounding: Rounding) -> Blocks:
    """Quantizes `weight`, float32 [N, K], with second columns for `outliers`."""
    first = rounding(weight, settings)
    left = weight[:, outliers] - first.values()[:, outliers]
    second = rounding(np.ascontiguousarray(left), settings)
    return replace(
        first,
        packed=np.concatenate([first.packed, second.packed], 1),
        scales=np.concatenate([first.scales, second.scales], 1),
        columns=first.columns + second.columns,
        outliers=outliers,
    )
