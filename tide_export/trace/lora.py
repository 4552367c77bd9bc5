"""Marks the linear layers that low-rank adapters may change while a model is traced.

`tide::TideLora` follows each of them: y [B, S, N], what the layer gives, and x [B, S, K], what it read, -> y changed by
the adapter of each sequence, y + x down up (LoRA, Hu et al. 2021, arXiv 2106.09685). `compose.lora` connects the nodes
to the adapters' weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel
from tide_export.names.operators import OP_LORA
from tide_export.quantize.matrices import is_linear
from tide_export.trace.symbolic import symbolic


@contextmanager
def symbolic_lora(source: SourceModel, rank: int) -> Iterator[None]:
    """Adds a symbolic operator after every linear layer of the decoder layers, while open; rank 0: none.

    Raises:
        UnsupportedModelError: there is none.
    """
    names = {module: name for name, module in source.model.named_modules()}
    targets: dict[nn.Module, list[int]] = {}  # the layers that run each: several where layers run in loops
    for number, layer in enumerate(source.structure.layers if rank else ()):
        for module in filter(is_linear, layer.modules()):
            targets.setdefault(module, []).append(number)

    if rank and not targets:
        raise UnsupportedModelError(
            f"{source.architecture} has no linear layers that adapters could change: omit lora_rank"
        )

    def forward_of(module: nn.Module, layers: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = type(module).forward(module, x)
            if x.dim() != 3:  # its rows may be other than tokens
                return y
            attributes = {"target": names[module], "layers": layers, "rank": rank}
            return symbolic(OP_LORA, [y, x], attributes, y.shape)

        return forward

    overridden = {module: vars(module)["forward"] for module in targets if "forward" in vars(module)}
    for module, numbers in targets.items():
        module.forward = forward_of(module, numbers)
    try:
        yield
    finally:
        for module in targets:
            if module in overridden:
                module.forward = overridden[module]
            else:
                del module.forward
