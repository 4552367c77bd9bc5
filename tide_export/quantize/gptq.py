"""GPTQ: rounds a matrix column by column and compensates each error in the columns not yet rounded.

Frantar et al., https://arxiv.org/abs/2210.17323. The Hessian of the matrix's inputs on text estimates the cost of an
error. The layers run in order, each on the outputs of the quantized layers before it. Scales are those of the weights
before they are compensated, so that the columns of the largest inputs can come first.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tide_export.errors import CalibrationError, UnsupportedModelError
from tide_export.model.outputs import first_tensor
from tide_export.model.quantized_weights import Blocks, packed_rows
from tide_export.model.source import SourceModel
from tide_export.quantize.matrices import Matrix, input_sums

DAMPING = 0.01  # share of the Hessian's mean diagonal that is added to it, as in the paper
COLUMNS = 128  # whose errors are compensated in the columns after them at once


@dataclass
class LayerInputs:
    """The inputs of the layers for one sequence of S tokens.

    Attributes:
        hidden: the next layer's hidden states, [1, S, D].
        calls: the other arguments of every layer, positional and keyword.
    """

    hidden: torch.Tensor
    calls: list[tuple[tuple, dict[str, Any]]]


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
    rounded: Callable[[Matrix], Blocks],
    keep: Callable[[Matrix, Blocks], None],
) -> None:
    """Quantizes the matrices of one layer in place and advances `texts` to the next layer.

    Args:
        number: index of the layer, from 0.
        linear: the layer's matrices by module.
        rounded: rounds a matrix to the nearest integers, whose scales are kept.
        keep: overwrites a matrix with its blocks.

    Raises:
        CalibrationError: a matrix got no inputs, or NaN or infinite ones.
    """
    with input_sums(linear, _products) as hessians:
        for text in texts:
            _run(layer, number, text)
    for module, matrix in linear.items():
        keep(matrix, compensate(matrix, hessians.get(module), rounded(matrix)))
    for text in texts:
        text.hidden = _run(layer, number, text)


def _run(layer: nn.Module, number: int, text: LayerInputs) -> torch.Tensor:
    args, kwargs = text.calls[number]
    return first_tensor(layer(text.hidden, *args, **kwargs))


def head_hessian(source: SourceModel, texts: Sequence[LayerInputs]) -> torch.Tensor:
    """Sums up the products of the head's inputs, [K, K], when `texts` are after the last layer."""
    return sum((_products(source.normalize(text.hidden)) for text in texts), torch.zeros(()))


def _products(states: torch.Tensor) -> torch.Tensor:
    """Returns the products of inputs [.., K] with each other, [K, K]."""
    rows = states.flatten(0, -2).float()
    return rows.T @ rows


def compensate(matrix: Matrix, hessian: torch.Tensor | None, rounded: Blocks) -> Blocks:
    """Chooses other integers for `rounded`, those of GPTQ on its scales and zero points.

    Args:
        hessian: of the inputs, [K, K]; None: there were none.

    Raises:
        CalibrationError: there were no inputs, or NaN or infinite ones.
    """
    if hessian is None or not bool(torch.isfinite(hessian).all()):
        raise CalibrationError(f"the text does not reach {matrix.name}, or overflows there: give other text")
    damped = hessian.double().cpu()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-9))
    order = torch.argsort(damped.diagonal(), descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    steps = torch.linalg.cholesky(inverse, upper=True).float()
    left, grid = torch.from_numpy(matrix.read())[:, order].T.contiguous(), _Grid(rounded)  # [K, N]
    for first in range(0, len(left), COLUMNS):
        last = min(first + COLUMNS, len(left))
        errors = torch.empty(last - first, left.shape[1])
        for column in range(first, last):
            value = grid.round(int(order[column]), left[column])
            errors[column - first] = (left[column] - value) / steps[column, column]
            left[column + 1 : last] -= torch.outer(steps[column, column + 1 : last], errors[column - first])
        left[last:] -= steps[first:last, last:].T @ errors
    return grid.blocks()


class _Grid:
    """Rounds the columns of a matrix to the numbers that the scales and zero points of its blocks allow."""

    def __init__(self, rounded: Blocks):
        self.rounded, self.most = rounded, 2**rounded.bits - 1
        self.scales = torch.from_numpy(rounded.scales).T.contiguous()  # [blocks, N]
        self.zeros = torch.from_numpy(rounded.zero_points()).T.contiguous()
        self.chosen = torch.empty(rounded.columns, rounded.rows, dtype=torch.uint8)
        outliers = [] if rounded.outliers is None else rounded.outliers.tolist()
        self.second = {column: rounded.inputs + number for number, column in enumerate(outliers)}

    def round(self, column: int, weights: torch.Tensor) -> torch.Tensor:
        """Chooses the integers of one input's column, and of its second one, and returns their value, [N]."""
        value = self._nearest(column, weights)
        if column in self.second:
            value += self._nearest(self.second[column], weights - value)
        return value

    def _nearest(self, column: int, weights: torch.Tensor) -> torch.Tensor:
        scale, zero = (part[column // self.rounded.block_size] for part in (self.scales, self.zeros))
        steps = torch.where(scale == 0, 0.0, weights / scale)  # a scale is 0 where all weights of its block are
        integers = (steps.round() + zero).clamp(0, self.most)
        self.chosen[column] = integers.to(torch.uint8)
        return (integers - zero) * scale

    def blocks(self) -> Blocks:
        rounded = self.rounded
        return replace(rounded, packed=packed_rows(self.chosen.T.numpy(), rounded.block_size, rounded.bits))
