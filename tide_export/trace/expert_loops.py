"""Runs a model's loop over the experts that tokens chose once, for all of them.

Experts that do not use transformers' interface (DBRX) are a loop whose length depends on data:

    mask = one_hot(top_k_index, num_classes).permute(2, 1, 0)
    for expert in greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = where(mask[expert[0]])
        states = linear(hidden_states[token], weights[expert[0]])
        result.index_add_(0, token, states * top_k_weights[token, slot, None])

While a model is traced, `top_k_index` is a `_Choice`, of which the same code makes one iteration for all rows (a row is
a token and one of its experts): `token` and `slot` are those of every row, and `weights[expert]` the weights of each
row's expert, a product with which is `tide::TideExpertMatMul`. Any other use of the choice raises an error.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional

from tide_export.graph.rewriting import constant, nodes_of, producer, required, static_dim
from tide_export.names.operators import DOMAIN, OP_EXPERT_MATMUL
from tide_export.trace.experts import expert_product


@contextmanager
def single_iterations(model: nn.Module) -> Iterator[None]:
    """Makes every loop of `model` over chosen experts run once and emit symbolic products, while open."""
    looping = [module for module in model.modules() if _loops(module)]
    for module in looping:
        module.forward = _once(module.forward)
    try:
        yield
    finally:
        for module in looping:
            del module.forward


def store_stacked(traced: ir.Model) -> None:
    """Stores experts' weights in the shape [E, N, K] that `traced` reshapes them to, uncopied."""
    for node in nodes_of(traced.graph, OP_EXPERT_MATMUL, DOMAIN):
        reshape = producer(node.inputs[-1], "Reshape")
        stored = required(reshape.inputs[0]) if reshape is not None else None
        if reshape is None or stored is None or not stored.is_initializer():
            continue
        shape = [static_dim(reshape.outputs[0], axis) for axis in range(3)]
        array = required(stored.const_value).numpy().reshape(shape)
        node.replace_input_with(2, constant(traced.graph, f"{stored.name}.stacked", array))


def _loops(module: nn.Module) -> bool:
    """Returns whether `module` has a loop as above, and no interface by which it is replaced."""
    forward = inspect.unwrap(type(module).forward)
    return (
        not hasattr(module, "is_transposed")
        and "top_k_index" in inspect.signature(forward).parameters
        and "one_hot" in forward.__code__.co_names
    )


def _once(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return forward(hidden_states, _Choice(top_k_index), top_k_weights)

    return run


class _Stand:
    """Stands for a tensor of the loop; what PyTorch's functions make of one is in FUNCTIONS."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return FUNCTIONS[function](*args, **kwargs or {}) if function in FUNCTIONS else NotImplemented


@dataclass(eq=False)
class _Choice(_Stand):
    """Stands for the experts of every token [T, k], for the mask that is made of them, and for an expert."""

    index: Tensor

    def permute(self, *axes: int) -> "_Choice":
        if axes != (2, 1, 0):
            raise TypeError(f"a loop over experts whose mask has its axes in the order {axes}")
        return self

    def sum(self, dim: tuple[int, ...]) -> "_Choice":
        return self

    def nonzero(self) -> "list[_Choice]":
        return [self]

    def __getitem__(self, _: object) -> "_Choice":
        return self


@dataclass(eq=False)
class _Rows(_Stand):
    """Stands for the token of every row, or which of its token's `chosen` experts it has."""

    chosen: int


@dataclass(eq=False)
class _Weights(_Stand):
    """Stands for the weights of each row's expert.

    Attributes:
        expert: of each row, [R].
        stored: weights of all experts, [E, K, N], or [E, N, K] where `transposed`.
    """

    expert: Tensor
    stored: Tensor
    transposed: bool = False

    @property
    def T(self) -> "_Weights":
        return _Weights(self.expert, self.stored, not self.transposed)


def _where(choice: _Choice) -> tuple[_Rows, _Rows]:
    rows = _Rows(choice.index.shape[-1])
    return rows, rows


def _read(tensor: Tensor, key: Any) -> Tensor | _Weights:
    if isinstance(key, _Choice):  # weights or biases of all experts
        expert = key.index.reshape(-1)
        return _Weights(expert, tensor) if tensor.dim() == 3 else tensor[expert]
    if isinstance(key, _Rows):  # hidden states [T, D]
        return tensor[:, None].expand(-1, key.chosen, -1).reshape(-1, tensor.shape[-1])
    return tensor.reshape(-1, 1)  # the weight of every row's expert [T, k]


def _product(rows: Tensor, weights: _Weights) -> Tensor:
    return expert_product(rows, weights.expert, weights.stored, not weights.transposed)


def _add_rows(result: Tensor, _: int, rows: _Rows, states: Tensor) -> Tensor:
    return result.add_(states.unflatten(0, (-1, rows.chosen)).sum(dim=1))


def _unchanged(choice: _Choice, *_: object, **__: object) -> _Choice:
    return choice


FUNCTIONS: dict[Callable, Callable] = {
    functional.one_hot: _unchanged,
    functional.linear: lambda rows, weights: _product(rows, weights.T),
    torch.greater: _unchanged,
    torch.where: _where,
    torch.matmul: _product,
    Tensor.matmul: _product,
    Tensor.__matmul__: _product,
    Tensor.__getitem__: _read,
    Tensor.index_add_: _add_rows,
}
