"""Makes every architecture emit one symbolic attention op a layer while it is traced.

`transformers` lets a named function stand in for attention (`AttentionInterface`) and for the mask
(`AttentionMaskInterface`). Ours writes a `tide::TideAttention` node instead of computing: rotated query [B, H, S, Dh]
and unrepeated key and value [B, H_kv, S, Dh] in, [B, S, H, Dh] out, causal by definition. `compose` gives the node its
K/V cache, `lower` turns it into the target's own attention. Models that never call the interface leave no node behind,
which `tracer` counts and refuses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tide_export.errors import UnsupportedModelError
from tide_export.model import quiet_transformers
from tide_export.names import DOMAIN, OP_ATTENTION

IMPLEMENTATION = "tide_export"

# Keyword arguments that change what attention computes and that no target lowers yet.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "head masks",
}


def emit_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The stand-in `transformers` calls; the signature is that of its attention functions."""
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} attends with {what}, which cannot be exported yet")
    batch, heads, length, head_dim = query.shape
    if value.shape[-1] != head_dim or key.shape[-1] != head_dim:
        raise UnsupportedModelError(
            f"{type(module).__name__} has keys of width {key.shape[-1]} and values of width {value.shape[-1]}: "
            "both must be as wide as the queries"
        )
    attributes: dict[str, Any] = {
        "layer": int(getattr(module, "layer_idx", -1)),
        "num_heads": int(heads),
        "kv_num_heads": int(key.shape[1]),
        "head_dim": int(head_dim),
        "scale": float(head_dim**-0.5 if scaling is None else scaling),
    }
    if sliding_window:
        attributes["window"] = int(sliding_window)
    if softcap:
        attributes["softcap"] = float(softcap)
    output = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP_ATTENTION}",
        (query, key, value),
        attrs=attributes,
        dtype=query.dtype,
        shape=(batch, length, heads, head_dim),
        version=1,
    )
    return output, None


AttentionInterface.register(IMPLEMENTATION, emit_attention)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


@contextmanager
def symbolic_attention(model: PreTrainedModel) -> Iterator[None]:
    """While open, `model` emits symbolic attention instead of computing it.

    Raises:
        UnsupportedModelError: the architecture refuses any attention but its own.
    """
    before = model.config._attn_implementation
    try:
        with quiet_transformers():  # it warns of what `refuse_ignored_attention` makes an error
            model.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"{_does_not_use_interface(model)} ({str(error).splitlines()[0]})") from error
    try:
        yield
    finally:
        with quiet_transformers():
            model.set_attn_implementation(before)


def _does_not_use_interface(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} does not compute its attention through transformers' attention interface, "
        "so it cannot be traced"
    )


def refuse_ignored_attention(model: PreTrainedModel, found: int, expected: int) -> None:
    """Raises UnsupportedModelError if a trace holds another number of attention ops than the model has layers."""
    if found == 0:
        raise UnsupportedModelError(_does_not_use_interface(model))
    if found != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the trace holds {found} attention ops for {expected} layers; "
            "layers without attention, or with several, cannot be exported"
        )
