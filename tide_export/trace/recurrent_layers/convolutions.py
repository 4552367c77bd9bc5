"""Layers that convolve tokens causally, each channel or token id by itself."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tide_export.trace.recurrent_layers.operators import causal_conv, delayed


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Convolves tokens [B, D, S] with a weight [D, K]."""
    return causal_conv(hidden_states.transpose(1, 2), weight, bias, activation).transpose(1, 2)


def convolved(conv: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Convolves tokens [B, D, S] by a module of PyTorch, for which `sees_the_past` holds."""
    return causal_conv1d_fn(hidden_states, conv.weight.squeeze(1), conv.bias)


def sees_the_past(module: nn.Module) -> bool:
    """Whether it convolves each channel causally.

    It pads by so much that the first outputs, one a token, are causal.
    """
    if not isinstance(module, nn.Conv1d):
        return False
    alone = module.in_channels == module.out_channels == module.groups and module.stride == module.dilation == (1,)
    return alone and module.kernel_size[0] > 1 and module.padding == (module.kernel_size[0] - 1,)


def shifts_by_a_token(module: nn.Module) -> bool:
    """Whether it pads tokens [B, S, D] so that each takes the next one's place (RWKV)."""
    return isinstance(module, nn.ZeroPad2d) and module.padding == (0, 0, 1, -1)


def dilated_convolution(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Convolves tokens [B, S, D] some steps apart (Qwen 4)."""
    weight, (step,) = self.conv1d.weight.squeeze(1), self.conv1d.dilation
    weight = functional.pad(weight[..., None], (step - 1, 0)).flatten(1)[:, step - 1 :]
    return causal_conv(hidden_states, weight, self.conv1d.bias, "silu")


def earlier_tokens(self: Any, token_ids: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns ids [B, S] of so many tokens before, the end's after an end (Qwen 4).

    Args:
        token_ids: of the text, after those that stand for what is before it.
    """
    end = float(self.eos_token_id)
    ids = (token_ids[:, self.context_len :, None].float() - end).expand(-1, -1, self.ngram_size)
    weight = torch.eye(self.ngram_size, device=ids.device).flip(1)
    now, *before = (causal_conv1d_fn(ids.transpose(1, 2), weight) + end).unbind(1)
    for by, earlier in enumerate(before[:shift]):
        now = torch.where(now == end, end, earlier) if by else earlier
    return now.to(token_ids.dtype)


def compressed_attention(
    self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes queries, keys and values [B, S, heads, D] by convolutions of queries and keys (ZAYA)."""
    split = partial(torch.split, split_size_or_sections=[self.num_attention_heads, self.num_key_value_heads], dim=2)
    tokens = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states)], -1)
    window = torch.stack([*(delayed(tokens, by) for by in range(self.conv_kernel_size, 0, -1)), tokens], -1)
    mixed = self.conv_qk_grouped(self.conv_qk_depthwise(window.flatten(0, 1))).view(tokens.shape)
    query, key = split(tokens.unflatten(-1, (-1, self.head_dim)))
    query = (query + key.repeat_interleave(self.num_key_value_groups, 2)) * 0.5
    key = query.unflatten(2, (-1, self.num_key_value_groups)).mean(3)
    mixed_query, mixed_key = split(mixed.unflatten(-1, (-1, self.head_dim)))
    before = delayed(self.v_proj_delayed(hidden_states), 1, self.v_proj_delayed.bias)
    value = torch.cat([self.v_proj_current(hidden_states), before], -1).unflatten(-1, (-1, self.head_dim))
    return mixed_query + query, mixed_key + key, value
