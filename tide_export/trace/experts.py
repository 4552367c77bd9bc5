"""Makes mixture-of-experts layers emit two symbolic matrix products.

The model would sort tokens by expert.

`transformers` lets a named function compute a layer's experts (`ExpertsInterface`), as it does for attention. The
functions it has gather a copy of an expert's weights per token or loop over data-dependent slices, which cannot be
traced. This one emits `tide::TideExpertMatMul`: rows [T, c, K] of T tokens, where c is k or 1 (all of a token's experts
read one row), the k experts of each token int64 [T, k] and the weights of all experts -> [T, k, N]. `lower` decides how
rows meet their expert. Gate, activation, biases and routing weights remain the model's code.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tide_export.common.progress import quiet_transformers
from tide_export.names.operators import OP_EXPERT_MATMUL
from tide_export.trace.symbolic import symbolic

IMPLEMENTATION = "tide_export"


@contextmanager
def symbolic_experts(model: PreTrainedModel, quantized: Collection[str] = ()) -> Iterator[None]:
    """Makes `model`'s experts emit symbolic products, while open.

    A model whose experts cannot be replaced is left alone.

    A weight with `<parameter>.0` among `quantized` is not an input of its product, which names the parameter instead.
    """
    if not model._can_set_experts_implementation():
        yield
        return
    by_module = {
        (module, name): f"{path}.{name}"
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if f"{path}.{name}.0" in quantized
    }
    before = model.get_experts_implementation()
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = emitter(by_module)
    try:
        with quiet_transformers():
            model.set_experts_implementation(IMPLEMENTATION)
        yield
    finally:
        with quiet_transformers():
            model.set_experts_implementation(before)
        del ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]


def expert_product(
    rows: torch.Tensor,
    expert: torch.Tensor,
    weights: torch.Tensor,
    transposed: bool,
    quantized: str | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """Emits the product of rows [T, c, K] with the weights of each token's experts [T, k], -> [T, k, N].

    Args:
        weights: of all experts, [E, N, K], or [E, K, N] where `transposed`.
        quantized: their name, if they are quantized.
        count: of the experts that compute, the first of those with weights; None: all.
    """
    width = int(weights.shape[-1 if transposed else -2])
    attributes: dict[str, Any] = {"num_experts": count or int(weights.shape[0]), "transposed": int(transposed)}
    inputs = [rows, expert, weights]
    if quantized is not None:
        attributes |= {"weights": [quantized], "width": width}
        inputs.pop()
    return symbolic(OP_EXPERT_MATMUL, inputs, attributes, (*expert.shape, width))


def emitter(quantized: Mapping[tuple[nn.Module, str], str]) -> Callable[..., torch.Tensor]:
    """The function `transformers` calls.

    Args:
        quantized: names of quantized parameters, by their module and name in it: in a trace the parameter itself is
            another tensor.
    """

    def product(module: Any, rows: torch.Tensor, expert: torch.Tensor, name: str) -> torch.Tensor:
        stored = getattr(module, name)
        result = expert_product(rows, expert, stored, module.is_transposed, quantized.get((module, name)))
        return result + getattr(module, f"{name}_bias")[expert] if module.has_bias else result

    def emit_experts(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [T, D], experts and weights of each [T, k] -> [T, D]."""
        rows = product(module, hidden_states[:, None], top_k_index, "gate_up_proj" if module.has_gate else "up_proj")
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = product(module, rows, top_k_index, "down_proj")
        if getattr(module, "has_post_expert_norm", False):
            rows = module.post_expert_norm(rows)
        return (rows * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    return emit_experts
