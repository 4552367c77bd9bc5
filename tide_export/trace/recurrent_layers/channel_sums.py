"""Sums that decay, each channel by itself: gated linear recurrent units and RWKV's averages."""

from typing import Any

import torch

from tide_export.trace.recurrent_layers.operators import decayed_sums, delayed

LARGEST_KEY = 300.0  # of RWKV: sums of exp(key / 4) are finite in float32


def scan_of_units(
    _self: Any,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Sums tokens [B, S, D], of which the gate keeps a share (RecurrentGemma)."""
    return decayed_sums(hidden_states, recurrent_gate * ~reset).to(hidden_states.dtype), None


def averages_of_values(
    time_decay: torch.Tensor, time_first: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Averages values [B, S, D] by exp(key), which decays (RWKV).

    The token's own counts by exp(key + time_first).

    The sums stand over scale^4, where scale sums exp(key / 4): no less than the largest exp(key), and all finite.
    """
    root = (key.float().clamp(-LARGEST_KEY, LARGEST_KEY) / 4).exp()
    own = root * (time_first / 4).exp()
    root_before, value_before = delayed(torch.cat([root, value.float()], -1), 1).chunk(2, -1)
    scale = decayed_sums(root_before, (time_decay.exp() / -4).exp().expand(root.shape))
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # of no tokens
    share = root_before / scale
    weights, decays = (_fourth_power(one).repeat(1, 1, 2) for one in (share, 1 - share))
    terms = torch.cat([value_before, torch.ones_like(root)], -1) * weights
    numerator, denominator = decayed_sums(terms, decays).chunk(2, -1)
    largest = torch.maximum(scale, own)
    before, now = _fourth_power(scale / largest), _fourth_power(own / largest)
    average = (before * numerator + now * value) / (before * denominator + now)
    return average.to(value.dtype), None


def _fourth_power(x: torch.Tensor) -> torch.Tensor:
    return x.square().square()
