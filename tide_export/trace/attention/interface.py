"""Makes every architecture emit one symbolic attention op a layer while it is traced.

`transformers` lets a named function stand in for attention (`AttentionInterface`) and for the mask
(`AttentionMaskInterface`). Ours writes a `tide::TideAttention` node instead of computing: rotated query [B, H, S, Dh]
and unrepeated key and value [B, H_kv, S, Dh] in, and a sink logit per head [H] where the model has them; [B, S, H, Dh]
out, causal by definition. `compose` gives the node its K/V cache, `lower` turns it into the target's own attention.
Models that never call the interface leave no node behind, which `tracer` counts and refuses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tide_export.errors import UnsupportedModelError
from tide_export.model.attention import attention_implementation, does_not_use_interface
from tide_export.names import DOMAIN, OP_ATTENTION
from tide_export.trace.attention.masks import Mask

IMPLEMENTATION = "tide_export"
HEAD_DIM_STEP = 8  # kernels want widths of whole vectors; ONNX Runtime's insists on it

# Keyword arguments that change what attention computes and that no target lowers yet.
_UNSUPPORTED = {
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "head masks",
}


def emitter(masks: Sequence[Mask | None]) -> Callable:
    """The stand-in `transformers` calls, for a model whose layers have these masks; the signature is that of its
    attention functions."""

    def emit_attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        for name, what in _UNSUPPORTED.items():
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} attends with {what}, which cannot be exported yet"
                )
        batch, heads, length, query_dim = query.shape
        value_dim = value.shape[-1]
        # One width for all three: zeros in queries and keys add nothing to a product, and those in values are cut off
        # again. DeepSeek's latent attention has wider keys than values.
        widest = max(query_dim, value_dim)
        head_dim = -(-widest // HEAD_DIM_STEP) * HEAD_DIM_STEP
        query, key, value = (
            functional.pad(t, (0, head_dim - t.shape[-1])) if t.shape[-1] < head_dim else t for t in (query, key, value)
        )
        layer = int(getattr(module, "layer_idx", -1))
        attributes: dict[str, Any] = {
            "layer": layer,
            "num_heads": int(heads),
            "kv_num_heads": int(key.shape[1]),
            "head_dim": int(head_dim),
            "scale": float(query_dim**-0.5 if scaling is None else scaling),
        }
        mask = masks[layer] if 0 <= layer < len(masks) else None
        if mask is not None and mask.kind == "window":
            attributes["window"] = mask.size
        if softcap:
            attributes["softcap"] = float(softcap)
        output = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{OP_ATTENTION}",
            (query, key, value) if s_aux is None else (query, key, value, s_aux),
            attrs=attributes,
            dtype=query.dtype,
            shape=(batch, length, heads, head_dim),
            version=1,
        )
        return output[..., :value_dim] if value_dim < head_dim else output, None

    return emit_attention


@contextmanager
def symbolic_attention(model: PreTrainedModel, masks: Sequence[Mask | None]) -> Iterator[None]:
    """While open, `model` emits symbolic attention instead of computing it.

    Args:
        masks: of its layers, from `layer_masks`. Blocks of tokens are traced as causal attention, which they are for
            sequences of one block: `package.context_length` sees to that.

    Raises:
        UnsupportedModelError: the architecture refuses any attention but its own.
    """
    AttentionInterface.register(IMPLEMENTATION, emitter(masks))
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
    with attention_implementation(model, IMPLEMENTATION):
        yield


def refuse_ignored_attention(model: PreTrainedModel, found: int, expected: int) -> None:
    """Raises UnsupportedModelError if a trace holds another number of attention ops than the model has layers."""
    if found == 0:
        raise UnsupportedModelError(does_not_use_interface(model))
    if found != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the trace holds {found} attention ops for {expected} layers; "
            "layers without attention, or with several, cannot be exported"
        )
