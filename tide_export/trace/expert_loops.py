"""Runs a model's loop over the experts that tokens chose once, for all of them.

Experts that do not use transformers' interface (DBRX) are a loop whose length depends on data:

    mask = one_hot(top_k_index, num_classes).permute(2, 1, 0)
    for expert in greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = where(mask[expert[0]])
        hidden = linear(hidden_states[token], weights[expert[0]])
        result.index_add_(0, token, hidden * top_k_weights[token, slot, None])

While a model is traced, `top_k_index` is a `_Choice`, of which the same code makes one iteration for all rows (a row is
a token and one of its experts): `token` and `slot` are those of every row, and `weights[expert]` the weights of each
row's expert, a product with which is `tide::TideExpertMatMul`. Any other use of the choice raises an error.

Where the code asks whether the expert's number is at least some bound (LongCat-Flash, whose last experts compute
nothing), it makes two iterations for all rows, with the two answers. Rows of the other answer then weigh 0.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
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
        module.forward = _once(module)
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


def _once(module: nn.Module) -> Callable[..., Tensor]:
    forward = inspect.unwrap(type(module).forward)
    names = {**forward.__globals__, "int": lambda number: number if isinstance(number, _Choice) else int(number)}
    looping = FunctionType(forward.__code__, names, closure=forward.__closure__)

    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return looping(module, hidden_states, _Choice(top_k_index), top_k_weights)

    return run


class _Stand:
    """Stands for a tensor of the loop; what PyTorch's functions make of one is in FUNCTIONS."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return FUNCTIONS[function](*args, **kwargs or {}) if function in FUNCTIONS else NotImplemented


@dataclass(eq=False)
class _Choice(_Stand):
    """Stands for the experts of every token [T, k], for the mask that is made of them, and for an expert.

    Attributes:
        bound: the least number of an expert of another kind; None: there is one kind.
        beyond: whether it stands for the experts from `bound` on.
    """

    index: Tensor
    bound: int | None = None
    beyond: bool = False

    @property
    def expert(self) -> Tensor:
        """The expert of each row, [R]; of a row that is not meant, any that is of the kind."""
        rows = self.index.reshape(-1)
        return rows if self.bound is None else rows.clamp(max=self.bound - 1)

    def of_rows(self, weights: Tensor) -> Tensor:
        """Returns the weight of every row's expert, [R, 1], of weights [T, k]."""
        weights = weights.reshape(-1, 1)
        if self.bound is None:
            return weights
        meant = (self.index.reshape(-1, 1) >= self.bound) == self.beyond
        return torch.where(meant, weights, 0.0)

    def permute(self, *axes: int) -> "_Choice":
        if axes != (2, 1, 0):
            raise TypeError(f"a loop over experts whose mask has its axes in the order {axes}")
        return self

    def sum(self, dim: tuple[int, ...]) -> "_Choice":
        return self

    def nonzero(self, as_tuple: bool = False) -> "Iterator[_Choice]":
        yield self
        if self.bound is not None:
            yield _Choice(self.index, self.bound, beyond=True)

    def numel(self) -> int:
        return 1  # some

    def item(self) -> "_Choice":
        return self

    def squeeze(self, _: int) -> "_Choice":
        return self

    def __ge__(self, bound: int) -> bool:
        self.bound = bound
        return self.beyond

    def __getitem__(self, key: object) -> "_Choice":
        return key if isinstance(key, _Choice) else self


@dataclass(eq=False)
class _Rows(_Stand):
    """Stands for the token of every row, or which of its token's experts it has."""

    choice: _Choice

    @property
    def chosen(self) -> int:
        """The number of a token's experts."""
        return self.choice.index.shape[-1]

    def numel(self) -> int:
        return 1  # some


@dataclass(eq=False)
class _Weights(_Stand):
    """Stands for the weights of each row's expert.

    Attributes:
        choice: the experts of all rows.
        stored: weights of all experts, [E, K, N], or [E, N, K] where `transposed`.
    """

    choice: _Choice
    stored: Tensor
    transposed: bool = False

    @property
    def T(self) -> "_Weights":
        return _Weights(self.choice, self.stored, not self.transposed)


def _where(choice: _Choice) -> tuple[_Rows, _Rows]:
    rows = _Rows(choice)
    return rows, rows


def _read(tensor: Tensor, key: Any) -> Tensor | _Weights:
    if isinstance(key, _Choice):  # weights or biases of all experts
        return _Weights(key, tensor) if tensor.dim() == 3 else tensor[key.expert]
    if isinstance(key, _Rows):  # hidden states [T, D]
        return tensor[:, None].expand(-1, key.chosen, -1).reshape(-1, tensor.shape[-1])
    return key[0].choice.of_rows(tensor)


def _product(rows: Tensor, weights: _Weights) -> Tensor:
    choice = weights.choice
    experts = choice.expert[:, None]  # of rows as tokens with one each
    return expert_product(rows[:, None], experts, weights.stored, not weights.transposed, count=choice.bound)[:, 0]


def _add_rows(result: Tensor, _: int, rows: _Rows, hidden: Tensor) -> Tensor:
    return result.add_(hidden.unflatten(0, (-1, rows.chosen)).sum(dim=1))


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
