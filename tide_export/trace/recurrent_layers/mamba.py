"""The scans of Mamba and Mamba 2, whose input decides how much of the state stays."""

from typing import Any

import torch
from torch.nn import functional

from tide_export.trace.recurrent_layers.operators import no_state, recurrence


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Any:
    """Scans tokens [B, S, heads, D] by Mamba 2, with one decay a head."""
    dt = _step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
    hidden_states = hidden_states.float()
    output = recurrence(C, B, hidden_states * dt[..., None], (A.float() * dt).exp())
    output = output if D is None else output + D[..., None] * hidden_states
    return (output, no_state(output)) if options.get("return_final_states") else output


def mamba_selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> Any:
    """Scans tokens [B, I, S] by Mamba, with one decay a number of the state [N, I]."""
    dt = _step_sizes(dt.transpose(1, 2), delta_bias, delta_softplus).float()  # [B, S, I]
    tokens = hidden_states.transpose(1, 2).float()
    decay = (A.float().t() * dt[:, :, None]).exp()  # [B, S, N, I]
    query, key = C.transpose(1, 2)[:, :, None], B.transpose(1, 2)[:, :, None]
    output = recurrence(query, key, (tokens * dt)[:, :, None], decay[:, :, None])[:, :, 0]
    output = output if D is None else output + D * tokens
    output = output.to(hidden_states.dtype).transpose(1, 2)
    output = output if z is None else output * functional.silu(z)
    return (output, no_state(output)) if options.get("return_last_state") else output


def _step_sizes(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt
