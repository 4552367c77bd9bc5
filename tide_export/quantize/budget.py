"""Chooses the bits of each matrix of an int4 model under one budget, by the divergence they add.

Each has 4 or 8. To second order, the KL divergence from the unrounded model is half the mean square of what the errors
change in the logarithm of a drawn token's probability (Fisher information). With errors taken as independent, a weight
adds half of: its squared error, times the mean square of its input, times that of the gradient at its output. Both are
measured on random tokens, with tokens drawn from the model's own distribution, so no text is needed.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tide_export.bundle.manifest import Quantization
from tide_export.common.progress import stage
from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import Matrix, find_matrices, input_sums, own_head, parameter_names
from tide_export.quantize.outliers import BATCH, FIRST, SEQUENCES, random_tokens, squares
from tide_export.quantize.rounding import Rounding, round_to_nearest

SCALE_BITS = 16


@torch.enable_grad()
def measure(
    source: SourceModel, modules: Collection[nn.Module]
) -> tuple[dict[nn.Module, np.ndarray], dict[nn.Module, np.ndarray]]:
    """Runs the model forwards and backwards on random tokens.

    Returns:
        For each module the mean squares of its inputs, float64 [K]; and, for as many tokens, of the gradients of a
        drawn token's negative log-likelihood at its outputs, [N].

    Raises:
        UnsupportedModelError: no gradient reaches one of the modules.
    """
    gradients = dict[nn.Module, torch.Tensor]()

    def add(module: nn.Module, gradient: torch.Tensor) -> None:
        gradients[module] = gradients.get(module, torch.zeros(())) + squares(gradient)

    def record(module: nn.Module, _: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: add(module, gradient))

    ids, chance, count = random_tokens(source), torch.Generator().manual_seed(0), 0
    with input_sums(modules, squares) as inputs, ExitStack() as hooks:
        embedding = source.model.get_input_embeddings()
        hooks.enter_context(embedding.register_forward_hook(lambda _m, _a, out: out.detach().requires_grad_()))
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
    if missing := [module for module in inputs if module not in gradients]:
        names = parameter_names(source.model)
        raise UnsupportedModelError(
            f"{source.architecture}: no gradient reaches {names[id(missing[0].weight)]}, and --bits needs one: omit it"
        )
    means = [{module: (each / count).numpy() for module, each in sums.items()} for sums in (inputs, gradients)]
    return means[0], means[1]


def choose_bits(source: SourceModel, settings: Quantization, rounding: Rounding = round_to_nearest) -> dict[int, int]:
    """Chooses 4 or 8 bits for layers and head: together `settings.budget` bits a weight, with scales.

    Matrices of the same inputs get the same. Experts, and what no random token reaches, have 4 bits. A head that is
    tied to the embedding gets a matrix of its own, unless 8 bits are chosen, which the embedding has.

    Returns:
        By `id` of the parameter: the bits of each.

    Raises:
        UnsupportedModelError: no gradient reaches one of the matrices.
    """
    assert settings.budget is not None
    found, head = find_matrices(source), source.model.get_output_embeddings()
    matrices = {module: matrix for layer in found.linear for module, matrix in layer.items()}
    if isinstance(head, nn.Linear):
        matrices[head] = Matrix("head", head.get_parameter("weight"))
    inputs, gradients = measure(source, matrices)
    alike: dict[bytes, list[nn.Module]] = {}
    for module, mean in inputs.items():
        alike.setdefault(mean.tobytes(), []).append(module)
    gains = dict[nn.Module, float]()
    with stage("comparing formats of the matrices", total=len(inputs)) as advance:
        for module, mean in inputs.items():
            weight = matrices[module].read()
            errors = [np.square(rounding(weight, replace(settings, bits=n)).values() - weight) for n in (4, 8)]
            gains[module] = float(gradients[module] @ (errors[0] - errors[1]).astype(np.float64) @ mean) / 2
            advance(1)
    experts = sum(matrix.size for layer in found.experts for matrix in layer)
    weights = experts + sum(matrix.size for matrix in matrices.values())
    left = weights * (settings.budget - 4 - SCALE_BITS / settings.block_size)
    bits = dict.fromkeys(inputs, 4)

    def size(group: list[nn.Module]) -> int:
        return sum(matrices[module].size for module in group)

    for group in sorted(alike.values(), key=lambda group: -sum(gains[module] for module in group) / size(group)):
        if 4 * size(group) <= left:
            left -= 4 * size(group)
            bits |= dict.fromkeys(group, 8)
    if bits.get(head) == 4:
        own_head(source)
    return {id(module.weight): chosen for module, chosen in bits.items()}
