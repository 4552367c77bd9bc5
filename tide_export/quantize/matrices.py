"""Which weights of a model are quantized: matrices of products, experts, the embedding and the head.

Found by watching the model run, so that parts a text never reaches (a vision tower) are left alone. Everything that
multiplies through `nn.Linear` or transformers' `Conv1D` counts, and experts that go through transformers' experts
interface. What routes between experts stays float32, as do matrices too small to gain anything.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tide_export.model.source import SourceModel

SMALLEST = 16  # rows and columns; a gate of one output is not worth a block
PRODUCTS: dict[type[nn.Module], Callable] = {nn.Linear: nn.Linear.forward, Conv1D: Conv1D.forward}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix [N, K] of the model, wherever and however it is stored.

    Attributes:
        name: of its parameter, with `.<number>` behind it where that holds all experts'.
        parameter: it is stored there,
        transposed: as [K, N],
        expert: at this index of the first dimension.
    """

    name: str
    parameter: nn.Parameter
    transposed: bool = False
    expert: int | None = None

    def read(self) -> np.ndarray:
        """A float32 copy, [N, K]."""
        stored = self._stored()
        return (stored.T if self.transposed else stored).detach().float().cpu().contiguous().numpy().copy()

    @torch.no_grad()
    def write(self, values: np.ndarray) -> None:
        """Puts `values`, float32 [N, K], in its place."""
        new = torch.from_numpy(values)
        self._stored().copy_(new.T if self.transposed else new)

    def _stored(self) -> torch.Tensor:
        return self.parameter if self.expert is None else self.parameter[self.expert]


@dataclass(frozen=True, eq=False)
class Matrices:
    """A model's matrices.

    Attributes:
        around: those outside the layers, embedding and head, each once also where they are one.
        products: of every layer those that a module of its own multiplies by, by that module.
        experts: of every layer the experts'.
        left: names of parameters of two or more dimensions that stay float32, though the layers hold them.
    """

    around: list[Matrix]
    products: list[dict[nn.Module, Matrix]]
    experts: list[list[Matrix]]
    left: list[str]

    def __len__(self) -> int:
        return len(self.around) + sum(map(len, self.products)) + sum(map(len, self.experts))


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The first name of every parameter, by id: one name for a tied one."""
    found: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), name)
    return found


def is_product(module: nn.Module) -> bool:
    """Whether the module does nothing but multiply by its `weight` and add its `bias`."""
    return any(isinstance(module, kind) and type(module).forward is own for kind, own in PRODUCTS.items())


def expert_weights(model: PreTrainedModel, module: nn.Module) -> list[str]:
    """The attributes of `module` that hold its experts' weights, where transformers' experts interface runs them."""
    if not model._can_set_experts_implementation() or not hasattr(module, "is_transposed"):
        return []
    return ["gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj"]


def find_matrices(source: SourceModel) -> Matrices:
    """The matrices of `source` that can be quantized."""
    model, names = source.model, parameter_names(source.model)
    experts = {getattr(source.text_config, name, None) for name in EXPERT_COUNTS}
    ran = _modules_that_run(source)

    def quantizable(module: nn.Module) -> bool:
        if not is_product(module) or module not in ran:
            return False
        rows, columns = _size(module)
        return min(rows, columns) >= SMALLEST and rows not in experts

    products: list[dict[nn.Module, Matrix]] = []
    routed: list[list[Matrix]] = []
    left: list[str] = []
    seen: set[int] = set()
    for layer in source.structure.layers:
        products.append({})
        routed.append([])
        for module in layer.modules():
            if quantizable(module) and id(module.weight) not in seen:
                parameter: nn.Parameter = module.weight  # type: ignore[assignment]
                products[-1][module] = Matrix(names[id(parameter)], parameter, isinstance(module, Conv1D))
                seen.add(id(parameter))
            for attribute in expert_weights(model, module):
                parameter = getattr(module, attribute)
                routed[-1] += [
                    Matrix(f"{names[id(parameter)]}.{index}", parameter, bool(module.is_transposed), index)
                    for index in range(len(parameter))
                ]
                seen.add(id(parameter))
        left += [names[id(p)] for p in layer.parameters() if p.ndim >= 2 and id(p) not in seen]
    around = []
    embedding = model.get_input_embeddings()
    others = [module for module in model.modules() if quantizable(module)]
    for module in ([embedding] if isinstance(embedding, nn.Embedding) else []) + others:
        parameter = module.weight  # type: ignore[assignment]
        if id(parameter) not in seen and min(parameter.shape) >= SMALLEST:
            around.append(Matrix(names[id(parameter)], parameter, isinstance(module, Conv1D)))
            seen.add(id(parameter))
    return Matrices(around, products, routed, left)


def _size(module: nn.Module) -> tuple[int, int]:
    """Rows N and columns K."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (int(columns), int(rows)) if isinstance(module, Conv1D) else (int(rows), int(columns))


def _modules_that_run(source: SourceModel) -> set[nn.Module]:
    ran: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda module, *_: ran.add(module)) for m in source.model.modules()]
    try:
        source.run(torch.zeros((1, 2), dtype=torch.long, device=source.device), [])
    finally:
        for handle in handles:
            handle.remove()
    return ran
