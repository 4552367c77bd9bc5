"""Chooses each matrix's format in an int4 model, under one budget of bits, by the divergence it adds.

Formats: 4 bits; 4 bits and second columns for the 1/32, 1/16 or 1/8 of the columns that add most (`quantize.outliers`);
8 bits. To second order, the KL divergence from the unrounded model is half the mean square of what the errors change in
the logarithm of a drawn token's probability (Fisher information). With errors taken as independent, a weight adds half
of: its squared error, times the mean square of its input, times that of the gradient at its output. Both are measured
on random tokens, with tokens drawn from the model's own distribution, so no text is needed. What 8 bits and second
columns leave is less than a hundredth of what 4 bits do, and counts as none.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from tide_export.bundle.manifest import Quantization
from tide_export.common.progress import stage
from tide_export.model.quantized_weights import Blocks
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import ROWS, Matrix, find_matrices, input_sums, own_head, parameter_names
from tide_export.quantize.outliers import SHARES, can_have, outlier_count
from tide_export.quantize.rounding import Rounding

SCALE_BITS = 16
SEQUENCES, LENGTH, BATCH = 32, 32, 2  # of random tokens
FIRST = 4  # position of the first token that is measured; those before are unlike all others

logger = logging.getLogger("tide_export")


@dataclass(frozen=True, eq=False)
class Format:
    """How a matrix is rounded.

    Attributes:
        bits: 4 or 8.
        outliers: columns that get a second one, int64 [R]; None: no column does.
        rounded: the matrix in 4 bits without second columns.
    """

    bits: int
    outliers: np.ndarray | None
    rounded: Blocks


@dataclass(eq=False)
class _Group:
    """Matrices of the same inputs, which get the same format.

    Attributes:
        added: the divergence that each column adds in 4 bits, float64 [K].
        size: number of weights.
        bits: chosen.
        outliers: the number of second columns chosen.
    """

    added: np.ndarray
    size: int = 0
    bits: int = 4
    outliers: int = 0
    modules: list[nn.Module] = field(default_factory=list)

    def left(self, bits: int, outliers: int) -> float:
        """Returns the divergence that is left with this format."""
        return 0.0 if bits == 8 else float(np.sort(self.added)[: len(self.added) - outliers].sum())

    def cost(self, bits: int, outliers: int, block_size: int) -> float:
        """Returns the bits that this format adds to those of 4 bits."""
        return 4 * self.size if bits == 8 else (4 + SCALE_BITS / block_size) * self.size * outliers / len(self.added)


def choose_formats(
    source: SourceModel, settings: Quantization, rounding: Rounding, widest: int = 8
) -> dict[int, Format]:
    """Chooses formats of layers and head that together take at most `settings.budget` bits a weight.

    Scales count. Matrices of the same inputs get the same. Experts, and what no random token reaches, have 4 bits. A
    head that is tied to the embedding gets a matrix of its own, unless 8 bits are chosen, which the embedding has.

    Args:
        widest: 4 where no matrix may have 8 bits.

    Returns:
        By `id` of the parameter: the format of each.
    """
    assert settings.budget is not None
    found, head = find_matrices(source), source.model.get_output_embeddings()
    matrices = {module: matrix for layer in found.linear for module, matrix in layer.items()}
    if isinstance(head, nn.Linear):
        matrices[head] = Matrix("head", head.get_parameter("weight"))
    inputs, gradients = measure(source, matrices)
    rounded: dict[nn.Module, Blocks] = {}
    groups: dict[bytes, _Group] = {}
    with stage("rounding the matrices to 4 bits", total=len(inputs)) as advance:
        for module, mean in inputs.items():
            weight = matrices[module].read()
            rounded[module] = rounding(weight, settings)
            group = groups.setdefault(mean.tobytes(), _Group(np.zeros(len(mean))))
            for first in range(0, len(weight), ROWS):
                rows = slice(first, first + ROWS)
                errors = np.square(rounded[module].part(rows).values() - weight[rows])
                group.added += (gradients[module][rows].astype(np.float32) @ errors) * mean / 2
            group.size += weight.size
            group.modules.append(module)
            advance(1)
    experts = sum(matrix.size for layer in found.experts for matrix in layer)
    weights = experts + sum(matrix.size for matrix in matrices.values())
    _spend(list(groups.values()), weights * (settings.budget - 4 - SCALE_BITS / settings.block_size), settings, widest)
    formats = {
        module: Format(group.bits, _largest(group.added, group.outliers), rounded[module])
        for group in groups.values()
        for module in group.modules
    }
    if head in formats and formats[head].bits == 4:
        own_head(source)
    return {id(module.weight): chosen for module, chosen in formats.items()}


def _spend(groups: Sequence[_Group], bits: float, settings: Quantization, widest: int) -> None:
    """Spends `bits` on better formats of `groups`, always where a bit takes most of the divergence away."""

    def better(group: _Group) -> list[tuple[float, float, _Group, int, int]]:
        columns = len(group.added)
        counts = [outlier_count(columns, settings, share) for share in SHARES] if can_have(columns, settings) else []
        now = group.cost(group.bits, group.outliers, settings.block_size)
        choices = []
        for format_ in [*((4, count) for count in counts), *([(8, 0)] if widest == 8 else [])]:
            more = group.cost(*format_, settings.block_size) - now
            less = group.left(group.bits, group.outliers) - group.left(*format_)
            if more > 0 and less > 0:
                choices.append((less / more, more, group, *format_))
        return choices

    open_to = {id(group): better(group) for group in groups}
    while fitting := [each for choices in open_to.values() for each in choices if each[1] <= bits]:
        _, more, group, *chosen = max(fitting, key=lambda each: each[0])
        group.bits, group.outliers = chosen
        bits -= more
        open_to[id(group)] = better(group)


def _largest(added: np.ndarray, count: int) -> np.ndarray | None:
    """Returns the ascending numbers of the `count` columns that add most, int64; None for no column."""
    return np.sort(np.argsort(-added, kind="stable")[:count]).astype(np.int64) if count else None


@torch.enable_grad()
def measure(
    source: SourceModel, modules: Collection[nn.Module]
) -> tuple[dict[nn.Module, np.ndarray], dict[nn.Module, np.ndarray]]:
    """Runs the model forwards and backwards on random tokens.

    Returns:
        For each module that ran the mean squares of its inputs, float64 [K]; and, for as many tokens, of the gradients
        of a drawn token's negative log-likelihood at its outputs, [N]: the others' mean where no gradient reaches it.
    """
    gradients = dict[nn.Module, torch.Tensor]()

    def add(module: nn.Module, gradient: torch.Tensor) -> None:
        gradients[module] = gradients[module] + squares(gradient)

    def record(module: nn.Module, _: tuple, output: torch.Tensor) -> None:
        gradients.setdefault(module, torch.zeros(output.shape[-1], dtype=torch.float64))
        if output.requires_grad:
            output.register_hook(lambda gradient: add(module, gradient))

    ids, chance, count = random_tokens(source), torch.Generator().manual_seed(0), 0
    with input_sums(modules, squares) as inputs, ExitStack() as hooks:
        embedding = source.model.get_input_embeddings()
        # Not a leaf, as some models scale it in place.
        hooks.enter_context(embedding.register_forward_hook(lambda _m, _a, out: 1 * out.detach().requires_grad_()))
        for module in modules:
            hooks.enter_context(module.register_forward_hook(record))
        advance = hooks.enter_context(stage("measuring what each matrix's errors change", total=SEQUENCES // BATCH))
        for batch in ids.split(BATCH):
            logits = source.model(input_ids=batch.to(source.device), use_cache=False).logits[:, FIRST:].flatten(0, 1)
            drawn = torch.multinomial(logits.detach().float().softmax(-1).cpu(), 1, generator=chance)[:, 0]
            loss = nn.functional.cross_entropy(logits.float(), drawn.to(logits.device), reduction="sum")
            if loss.requires_grad:
                loss.backward()
            count += len(drawn)
            advance(1)
    if missing := [module for module, sums in gradients.items() if not sums.any()]:
        mean = torch.stack([sums.mean() for sums in gradients.values() if sums.any()] or [torch.ones(())]).mean()
        gradients |= {module: mean.expand(len(gradients[module])) for module in missing}
        name = parameter_names(source.model)[id(missing[0].weight)]
        logger.info("no gradient reaches %s: its outputs count as others do", name)
    means = [{module: (each / count).numpy() for module, each in sums.items()} for sums in (inputs, gradients)]
    return means[0], means[1]


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
