"""GPTQ: rounds the columns of a matrix one after the other and makes up for each error in the columns still to come.

Frantar et al., https://arxiv.org/abs/2210.17323. What an error costs is told by the products of the matrix's inputs on
text (its Hessian). The algorithm is Intel Neural Compressor's; here the layers are walked, each fed by what the layers
before it give once they are quantized, and what it found is put into blocks. Called by `model.quantize_model`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tide_export.bundle.manifest import Quantization
from tide_export.errors import CalibrationError, ConfigError
from tide_export.model.quantized_weights import Blocks
from tide_export.model.source import SourceModel
from tide_export.model.structure import first_tensor
from tide_export.quantize.matrices import Matrix
from tide_export.quantize.rounding import round_to_nearest

DAMPING = 0.01  # of the Hessian's mean diagonal, added to it, as in the paper


@dataclass
class Text:
    """One sequence on its way through the layers.

    Attributes:
        states: what goes into the next layer, [1, S, D].
        calls: for every layer what its model calls it with beside the states, positional and named.
    """

    states: torch.Tensor
    calls: list[tuple[tuple, dict[str, Any]]]


def require_gptq() -> Any:
    """The module that holds the algorithm.

    Raises:
        ConfigError: Neural Compressor is not installed.
    """
    logging.disable(logging.WARNING)  # it announces the device it found, twice, and then sets its own level
    try:
        from neural_compressor.torch.algorithms.weight_only import gptq
    except ImportError as error:
        raise ConfigError(
            f"quantization gptq needs Neural Compressor ({error}): pip install 'tide_export[gptq]'"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    logging.getLogger("neural_compressor").setLevel(logging.ERROR)
    return gptq


@torch.no_grad()
def enter_layers(source: SourceModel, sequences: Sequence[Sequence[int]]) -> list[Text]:
    """Runs the model on each of `sequences` (token ids) and notes how it enters its layers."""
    layers, texts = source.structure.layers, []

    for ids in sequences:
        calls: list[tuple[tuple, dict[str, Any]]] = []

        def note(_module, args, kwargs, calls=calls):
            calls.append((args, dict(kwargs)))

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        try:
            source.raw_states(torch.tensor([list(ids)], device=source.device), [])
        finally:
            for handle in handles:
                handle.remove()
        args, kwargs = calls[0]
        states = args[0] if args else kwargs["hidden_states"]
        without = [(a[1:], {k: v for k, v in kw.items() if k != "hidden_states"}) for a, kw in calls]
        texts.append(Text(states, without))
    return texts


@torch.no_grad()
def quantize_layer(
    layer: nn.Module, number: int, products: Mapping[nn.Module, Matrix], texts: Sequence[Text], settings: Quantization
) -> dict[str, Blocks]:
    """Quantizes the matrices of one layer in place and moves `texts` behind it.

    Returns:
        Their blocks by name.

    Raises:
        CalibrationError: the inputs of a matrix were NaN or infinite, or there were none.
    """
    gptq = require_gptq()
    solvers = {
        module: gptq.GPTQ(nn.Linear(1, 1), torch.empty(matrix.read().shape)) for module, matrix in products.items()
    }
    with _inputs_of(solvers):
        for text in texts:
            _run(layer, number, text)
    found = {}
    for module, matrix in products.items():
        found[matrix.name] = blocks = _solve(gptq, solvers[module], matrix, settings)
        matrix.write(blocks.values())
    for text in texts:
        text.states = _run(layer, number, text)
    return found


def _run(layer: nn.Module, number: int, text: Text) -> torch.Tensor:
    args, kwargs = text.calls[number]
    return first_tensor(layer(text.states, *args, **kwargs))


@contextmanager
def _inputs_of(solvers: Mapping[nn.Module, Any]) -> Iterator[None]:
    """While open, whatever goes into these modules is added to their Hessians."""

    def add(module, args, output):
        solvers[module].add_batch(args[0].detach(), output)

    handles = [module.register_forward_hook(add) for module in solvers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _solve(gptq: Any, solver: Any, matrix: Matrix, settings: Quantization) -> Blocks:
    if not bool(torch.isfinite(solver.H).all()) or not solver.nsamples:
        raise CalibrationError(f"the text does not reach {matrix.name}, or overflows there: give other text")
    solver.quantizer = _Grid(settings)
    # A block of the algorithm is one of ours, so that a scale is chosen for the weights as they are by then.
    weight = torch.from_numpy(matrix.read())
    scales, _, zeros, values = solver.fasterquant(
        weight.clone(), blocksize=settings.block_size, percdamp=DAMPING, groupsize=settings.block_size
    )
    integers = solver.quantizer.integers(
        values, *(part.repeat_interleave(settings.block_size, dim=1)[:, : weight.shape[1]] for part in (scales, zeros))
    )
    return Blocks.from_integers(
        integers.to(torch.uint8).numpy(), scales.numpy(), zeros.to(torch.uint8).numpy(), settings
    )


class _Grid:
    """Stands in for Neural Compressor's quantizer: scales and zero points as ONNX Runtime's kernel chooses them.

    Without zero points its own are 7 % wider, because they leave out the lowest integer.
    """

    def __init__(self, settings: Quantization):
        self.settings = settings
        self.maxq = 2**settings.bits - 1
        self.scale = self.zero = torch.zeros(1)

    def ready(self) -> bool:
        """Whether the first block needs no scale before its turn comes."""
        return True

    def find_params(self, block: torch.Tensor, weight: bool) -> None:
        """Chooses `scale` and `zero` [N, 1] for weights [N, block size]."""
        found = round_to_nearest(block.numpy(), self.settings)
        self.scale = torch.from_numpy(found.scales)
        self.zero = torch.full_like(self.scale, 2 ** (self.settings.bits - 1))
        if found.zeros is not None:  # of one block: nothing to unpack but the low bits
            self.zero = torch.from_numpy((found.zeros & self.maxq).astype(np.float32))

    def integers(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The integers nearest to `x`, as floats; where the scale is 0, so were all weights."""
        return (torch.where(scale == 0, 0.0, x / scale).round() + zero).clamp(0, self.maxq)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, maxq: int) -> torch.Tensor:
        """What those integers stand for."""
        return scale * (self.integers(x, scale, zero) - zero)
