"""The delta rule with gates, in transformers' forms of Qwen3.5 and Kimi Linear."""

from typing import Any

import torch
from torch.nn import functional

from tide_export.trace.recurrent_layers.operators import no_state, recurrence

NORM_EPSILON = 1e-6  # of queries and keys


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gated delta rule; `g`: logarithms of the decays, one a head or one a row of its state."""
    output_dtype, (query, key) = query.dtype, (query.float(), key.float())
    scale = query.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query, scale), _normalized(key)
    else:
        query = query * scale
    output = recurrence(query, key, value, g.float().exp(), beta)
    return output.to(output_dtype), no_state(output)


def _normalized(states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`states` over their length, times `scale`: the norm by the root of the mean square is one operator."""
    width = states.shape[-1]
    weight = torch.full((width,), scale * width**-0.5, device=states.device)
    return functional.rms_norm(states, (width,), weight, NORM_EPSILON / width)
