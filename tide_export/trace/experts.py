"""Makes mixture-of-experts layers emit two symbolic matrix products instead of sorting tokens by expert.

`transformers` lets a named function stand in for a layer's experts (`ExpertsInterface`), as it does for attention. Its
own functions either gather a copy of an expert's weights per token or loop over data-dependent slices, which cannot be
traced. Ours writes `tide::TideExpertMatMul` nodes: rows [R, K], the expert of each row int64 [R] and the weights of all
experts in, [R, N] out. How rows meet their expert is the target's business (`lower`). Gate, activation, biases and
routing weights stay the model's own code.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tide_export.names import DOMAIN, OP_EXPERT_MATMUL
from tide_export.progress import quiet_transformers

IMPLEMENTATION = "tide_export"


def emit_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The stand-in `transformers` calls: tokens [T, D], experts and weights of each [T, k] -> [T, D]."""
    tokens, width = hidden_states.shape
    chosen = top_k_index.shape[-1]
    expert = top_k_index.reshape(-1)
    rows = hidden_states[:, None, :].expand(tokens, chosen, width).reshape(-1, width)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _product(module, rows, expert, up)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _product(module, rows, expert, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1, 1)
    return rows.reshape(-1, chosen, width).sum(dim=1).to(hidden_states.dtype)


def _product(module: Any, rows: torch.Tensor, expert: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(module, name)  # [E, K, N] where transposed, else [E, N, K]
    width = int(weight.shape[-1 if module.is_transposed else -2])
    attributes: dict[str, Any] = {"num_experts": int(weight.shape[0]), "transposed": int(module.is_transposed)}
    inputs = [rows, expert, weight]
    quantized = _QUANTIZED.get((id(module), name))  # while tracing, the parameter is another tensor
    if quantized is not None:
        attributes |= {"weights": [quantized], "width": width}
        inputs.pop()
    product = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP_EXPERT_MATMUL}",
        inputs,
        attrs=attributes,
        dtype=rows.dtype,
        shape=(rows.shape[0], width),
        version=1,
    )
    return product + getattr(module, f"{name}_bias")[expert] if module.has_bias else product


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, emit_experts)
# Names of the quantized parameters of the model being traced, by the id of their module and their name in it.
_QUANTIZED: dict[tuple[int, str], str] = {}


@contextmanager
def symbolic_experts(model: PreTrainedModel, quantized: Collection[str] = ()) -> Iterator[None]:
    """While open, experts of `model` that can be replaced emit symbolic products; other models are left alone.

    Of weights with `<parameter>.0` among `quantized`, products name the parameter instead of taking it as an input.
    """
    if not model._can_set_experts_implementation():
        yield
        return
    before = model.get_experts_implementation()
    with quiet_transformers():
        model.set_experts_implementation(IMPLEMENTATION)
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if f"{path}.{name}.0" in quantized:
                _QUANTIZED[id(module), name] = f"{path}.{name}"
    try:
        yield
    finally:
        _QUANTIZED.clear()
        with quiet_transformers():
            model.set_experts_implementation(before)
