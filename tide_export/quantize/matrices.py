"""Finds the weights of a model that are quantized: linear layers, experts, the embedding and the head.

The model runs once, to omit parts that text never reaches (a vision tower). Included are `nn.Linear`, transformers'
`Conv1D`, and experts that use transformers' experts interface. Gates that route to experts and matrices too small to
gain anything stay float32.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tide_export.errors import ConfigError
from tide_export.model.source import SourceModel

ROWS = 4096  # of a matrix, that are worked on at a time
MIN_SIZE = 16  # minimum rows and columns; a gate of one output is not worth a block
LINEAR_FORWARDS: dict[type[nn.Module], Callable] = {nn.Linear: nn.Linear.forward, Conv1D: Conv1D.forward}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass
class Change:
    """How far matrices were changed: sums of squares of the differences, and of the weights before."""

    differences: float = 0.0
    weights: float = 0.0

    @property
    def relative(self) -> float:
        """The norm of the differences over the norm of the weights."""
        return (self.differences / self.weights) ** 0.5 if self.weights else 0.0


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix [N, K] of the model, N outputs by K inputs.

    Attributes:
        name: name of its parameter, followed by `.<expert>` if the parameter holds all experts.
        parameter: the parameter that stores it.
        transposed: whether it is stored as [K, N].
        expert: its index in the parameter's first dimension; None if the parameter is the matrix.
    """

    name: str
    parameter: nn.Parameter
    transposed: bool = False
    expert: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows, N."""
        return int(self._stored().shape[1 if self.transposed else 0])

    @property
    def columns(self) -> int:
        """The number of columns, K."""
        return int(self._stored().shape[0 if self.transposed else 1])

    @property
    def size(self) -> int:
        """The number of weights."""
        return self._stored().numel()

    def read(self) -> np.ndarray:
        """Returns the matrix, float32 [N, K]: not to be changed, as it may be the model's own memory."""
        return self._rows().detach().float().cpu().contiguous().numpy()

    @torch.no_grad()
    def write(self, values: np.ndarray, change: Change, first: int = 0) -> None:
        """Overwrites rows, from `first` on, with `values`, float32 [n, K], and adds the change to `change`."""
        stored = self._rows()[first : first + len(values)]
        for old, new in zip(stored.split(ROWS), torch.from_numpy(values).split(ROWS), strict=True):
            before = old.float().cpu()
            change.differences += float((new - before).double().square().sum())
            change.weights += float(before.double().square().sum())
            old.copy_(new)

    def _rows(self) -> torch.Tensor:
        return self._stored().T if self.transposed else self._stored()

    def _stored(self) -> torch.Tensor:
        return self.parameter if self.expert is None else self.parameter[self.expert]


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of a model that can be quantized.

    Attributes:
        outside: matrices outside the layers: token embeddings and head, one matrix if they are tied.
        linear: for every layer, the matrices of its linear modules, by module.
        experts: for every layer, the matrices of its experts.
        unquantized: names of the layers' other parameters of two or more dimensions, which stay float32.
    """

    outside: list[Matrix]
    linear: list[dict[nn.Module, Matrix]]
    experts: list[list[Matrix]]
    unquantized: list[str]

    def all(self) -> list[Matrix]:
        """Returns all matrices in one list."""
        return [*self.outside, *chain.from_iterable(m.values() for m in self.linear), *chain(*self.experts)]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Returns `id(parameter)` -> its first name; tied parameters have one name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def is_linear(module: nn.Module) -> bool:
    """Returns whether the module only multiplies by its `weight` and adds its `bias`."""
    return any(isinstance(module, kind) and type(module).forward is fn for kind, fn in LINEAR_FORWARDS.items())


def expert_weights(model: PreTrainedModel, module: nn.Module) -> list[str]:
    """Returns the attributes of `module` that hold experts' weights for transformers' experts interface.

    Empty if that interface does not run it.
    """
    if not model._can_set_experts_implementation() or not hasattr(module, "is_transposed"):
        return []
    return ["gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj"]


def find_matrices(source: SourceModel) -> Matrices:
    """Finds the matrices of `source` that can be quantized, by running it on two tokens."""
    model, names = source.model, parameter_names(source.model)
    experts = {getattr(source.text_config, name, None) for name in EXPERT_COUNTS}
    executed, embeddings = _run_once(source)

    def quantizable(module: nn.Module) -> bool:
        if not is_linear(module) or module not in executed:
            return False
        rows, columns = _size(module)
        return min(rows, columns) >= MIN_SIZE and rows not in experts

    linear: list[dict[nn.Module, Matrix]] = []
    routed: list[list[Matrix]] = []
    unquantized: list[str] = []
    seen: set[int] = set()
    for layer in source.structure.layers:
        linear.append({})
        routed.append([])
        for module in layer.modules():
            if quantizable(module) and id(module.weight) not in seen:
                parameter: nn.Parameter = module.weight  # type: ignore[assignment]
                linear[-1][module] = Matrix(names[id(parameter)], parameter, isinstance(module, Conv1D))
                seen.add(id(parameter))
            for attribute in expert_weights(model, module):
                parameter = getattr(module, attribute)
                routed[-1] += [
                    Matrix(f"{names[id(parameter)]}.{index}", parameter, bool(module.is_transposed), index)
                    for index in range(len(parameter))
                ]
                seen.add(id(parameter))
        unquantized += [names[id(p)] for p in layer.parameters() if p.ndim >= 2 and id(p) not in seen]
    outside = []
    others = [module for module in model.modules() if quantizable(module)]
    for module in (*embeddings, *others):
        parameter = module.weight  # type: ignore[assignment]
        if id(parameter) not in seen and min(parameter.shape) >= MIN_SIZE:
            outside.append(Matrix(names[id(parameter)], parameter, isinstance(module, Conv1D)))
            seen.add(id(parameter))
    return Matrices(outside, linear, routed, unquantized)


def refuse_offloaded(source: SourceModel, weights: str) -> None:
    """Refuses to round weights that are not in memory.

    Raises:
        ConfigError: some of the weights are not in memory.
    """
    if any(parameter.is_meta for parameter in source.model.parameters()):
        raise ConfigError(
            f"weights {weights}: those of {source.name} are rounded only where all are in memory: omit --device-map "
            "or give --weights fp32"
        )


def own_head(source: SourceModel) -> None:
    """Gives the model's head, one linear layer, a matrix of its own where it shares the embedding's."""
    head: Any = source.model.get_output_embeddings()
    weight: torch.Tensor = head.weight
    if weight is getattr(source.model.get_input_embeddings(), "weight", None):
        head.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def own_head_name(source: SourceModel) -> str | None:
    """Returns the name that the matrix of `own_head` has."""
    head = source.model.get_output_embeddings()
    return next((f"{name}.weight" for name, module in source.model.named_modules() if module is head), None)


def _size(module: nn.Module) -> tuple[int, int]:
    """Returns rows N and columns K."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (int(columns), int(rows)) if isinstance(module, Conv1D) else (int(rows), int(columns))


def _run_once(source: SourceModel) -> tuple[set[nn.Module], list[nn.Embedding]]:
    """Runs the model on two tokens.

    Returns:
        The modules that ran, and the embeddings among them that read token ids.
    """
    ids = torch.tensor([[5, 2]])  # descending, unlike any positions
    executed: set[nn.Module] = set()
    embeddings: list[nn.Embedding] = []

    def record(module: nn.Module, args: tuple, _result: object) -> None:
        if isinstance(module, nn.Embedding) and module not in executed and _are_equal(args, ids):
            embeddings.append(module)
        executed.add(module)

    with ExitStack() as hooks:
        for module in source.model.modules():
            hooks.enter_context(module.register_forward_hook(record))
        source.run(ids.to(source.device), [])
    return executed, embeddings


def _are_equal(args: tuple, ids: torch.Tensor) -> bool:
    """Returns whether the first argument is `ids`: some embeddings of positions take a shape."""
    return bool(args) and torch.is_tensor(args[0]) and torch.equal(args[0].cpu(), ids)


@contextmanager
def input_sums(
    modules: Collection[nn.Module], of: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[nn.Module, torch.Tensor]]:
    """While open, sums up `of` the inputs of each module; equal inputs give equal sums, to the bit."""
    sums: dict[nn.Module, torch.Tensor] = {}
    last: list[torch.Tensor] = []  # inputs and what is added for them

    def add(module: nn.Module, args: tuple) -> None:
        if not args:
            return
        if not last or last[0] is not args[0]:
            last[:] = [args[0], of(args[0])]
        sums[module] = sums[module] + last[1] if module in sums else last[1]

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(add))
        yield sums
