"""GPTQ: rounds a matrix column by column and compensates each error in the columns not yet rounded.

Frantar et al., https://arxiv.org/abs/2210.17323. The Hessian of the matrix's inputs on text estimates the cost of an
error. Intel Neural Compressor implements the algorithm; this module runs the layers in order, each on the outputs of
the quantized layers before it, and packs the resulting integers.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tide_export.bundle.manifest import Quantization
from tide_export.errors import CalibrationError, ConfigError, UnsupportedModelError
from tide_export.model.outputs import first_tensor
from tide_export.model.quantized_weights import Blocks
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import Matrix
from tide_export.quantize.rounding import Rounding, round_to_nearest

DAMPING = 0.01  # share of the Hessian's mean diagonal that is added to it, as in the paper


@dataclass
class LayerInputs:
    """The inputs of the layers for one sequence of S tokens.

    Attributes:
        hidden: the next layer's hidden states, [1, S, D].
        calls: the other arguments of every layer, positional and keyword.
    """

    hidden: torch.Tensor
    calls: list[tuple[tuple, dict[str, Any]]]


def require_gptq() -> Any:
    """Imports the module with the algorithm.

    Raises:
        ConfigError: Neural Compressor is not installed.
    """
    # A filter, because the import resets the level of its logger and then logs the device.
    logging.getLogger("neural_compressor").addFilter(_is_error)
    try:
        from neural_compressor.torch.algorithms.weight_only import gptq
    except ImportError as error:
        raise ConfigError(
            f"quantization gptq needs Neural Compressor ({error}): pip install -e '.[gptq]' in the clone"
        ) from None
    return gptq


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@torch.no_grad()
def record_layer_inputs(source: SourceModel, sequences: Sequence[Sequence[int]]) -> list[LayerInputs]:
    """Runs the model on each of `sequences` (token ids) and records the arguments of its layers.

    Raises:
        UnsupportedModelError: a layer takes something else than the one before it gives.
    """
    texts = []
    for ids in sequences:
        calls: list[tuple[tuple, dict[str, Any]]] = []
        given: list[torch.Tensor] = []  # by the layer that ran last

        def record(_module, args, kwargs, calls=calls, given=given):
            hidden = args[0] if args else kwargs["hidden_states"]
            if given and not torch.equal(hidden, given[0].to(hidden.device)):
                raise UnsupportedModelError(
                    f"{source.architecture} changes hidden states between its layers, so gptq cannot follow them: "
                    "use rtn"
                )
            calls.append((args, dict(kwargs)))

        def keep(_module, _args, output, given=given):
            given[:] = [first_tensor(output)]

        with ExitStack() as hooks:
            for layer in source.structure.layers:
                hooks.enter_context(layer.register_forward_pre_hook(record, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(keep))
            source.raw_hidden(torch.tensor([list(ids)], device=source.device), [])
        args, kwargs = calls[0]
        hidden = args[0] if args else kwargs["hidden_states"]
        others = [(a[1:], {k: v for k, v in kw.items() if k != "hidden_states"}) for a, kw in calls]
        texts.append(LayerInputs(hidden, others))
    return texts


@torch.no_grad()
def quantize_layer(
    layer: nn.Module,
    number: int,
    linear: Mapping[nn.Module, Matrix],
    texts: Sequence[LayerInputs],
    settings: Quantization,
    rounding: Rounding = round_to_nearest,
) -> dict[str, Blocks]:
    """Quantizes the matrices of one layer in place and advances `texts` to the next layer.

    Args:
        number: index of the layer, from 0.
        linear: the layer's matrices by module.
        rounding: chooses the scales.

    Returns:
        Name of a matrix -> its blocks.

    Raises:
        CalibrationError: a matrix got no inputs, or NaN or infinite ones.
    """
    gptq = require_gptq()
    solvers = {
        module: gptq.GPTQ(nn.Linear(1, 1), torch.empty(matrix.read().shape)) for module, matrix in linear.items()
    }
    with _hessians(solvers):
        for text in texts:
            _run(layer, number, text)
    quantized = {}
    for module, matrix in linear.items():
        quantized[matrix.name] = blocks = _solve(solvers[module], matrix, settings, rounding)
        matrix.write(blocks.values())
    for text in texts:
        text.hidden = _run(layer, number, text)
    return quantized


def _run(layer: nn.Module, number: int, text: LayerInputs) -> torch.Tensor:
    args, kwargs = text.calls[number]
    return first_tensor(layer(text.hidden, *args, **kwargs))


@contextmanager
def _hessians(solvers: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Adds the inputs of the modules to their Hessians while the context is open."""

    def add(module, args, output):
        solvers[module].add_batch(args[0].detach(), output)

    with ExitStack() as hooks:
        for module in solvers:
            hooks.enter_context(module.register_forward_hook(add))
        yield


def _solve(solver: Any, matrix: Matrix, settings: Quantization, rounding: Rounding) -> Blocks:
    if not bool(torch.isfinite(solver.H).all()) or not solver.nsamples:
        raise CalibrationError(f"the text does not reach {matrix.name}, or overflows there: give other text")
    solver.quantizer = _Grid(settings, rounding)
    # The algorithm uses the format's blocks, so that each scale is chosen for the compensated weights.
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
    """Replaces Neural Compressor's quantizer: chooses scales and zero points as `rounding` does.

    Without zero points, Neural Compressor's scales are 7 % larger, because they omit the lowest integer.
    """

    def __init__(self, settings: Quantization, rounding: Rounding):
        self.settings, self.rounding = settings, rounding
        self.maxq = 2**settings.bits - 1
        self.scale = self.zero = torch.zeros(1)

    def ready(self) -> bool:
        """Returns True: the first block needs no scale in advance."""
        return True

    def find_params(self, block: torch.Tensor, weight: bool) -> None:
        """Chooses `scale` and `zero` [N, 1] for weights [N, block size]."""
        rounded = self.rounding(block.numpy(), self.settings)
        self.scale = torch.from_numpy(rounded.scales)
        self.zero = torch.full_like(self.scale, 2 ** (self.settings.bits - 1))
        if rounded.zeros is not None:  # one block a row: its zero point is in the low bits
            self.zero = torch.from_numpy((rounded.zeros & self.maxq).astype(np.float32))

    def integers(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Returns the integers nearest to `x`, as floats; a scale is 0 where all its weights are."""
        return (torch.where(scale == 0, 0.0, x / scale).round() + zero).clamp(0, self.maxq)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, maxq: int) -> torch.Tensor:
        """Rounds `x` to the values of its integers."""
        return scale * (self.integers(x, scale, zero) - zero)
