"""Linear attention: queries read decayed sums of keys times values (MiniMax, xLSTM)."""

from typing import Any

import torch

from tide_export.trace.recurrent_layers.operators import recurrence


def lightning_attention(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """Computes attention whose decays are constants of its heads (MiniMax)."""
    states = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (self.num_attention_heads, -1))
    decay = (-self.slope_rate.flatten()).exp().expand(states.shape[:3])
    query, key, value = states.chunk(3, dim=-1)
    output = recurrence(query, key, value, decay).to(hidden_states.dtype).flatten(2)
    return self.out_proj(self.output_gate(hidden_states).sigmoid() * self.norm(output)), None


def matrix_memory(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Reads a sum of keys times values by a query (xLSTM).

    Sums of exp(igate) key value^T, over those of exp(igate) key, or over 1 where that is larger.

    transformers adds eps to a multiple of the divisor: the norm of each head after this takes out the difference.
    """
    query, key, value, igate, fgate = (one.transpose(1, 2) for one in (query, key, value, igate, fgate))
    values = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    weighted = key * igate.exp()[..., None]
    sums = recurrence(query * query.shape[-1] ** -0.5, weighted, values, fgate.sigmoid())
    output = sums[..., :-1] / (sums[..., -1:].abs().clamp(min=1) + self.config.eps)
    return output.transpose(1, 2), None
