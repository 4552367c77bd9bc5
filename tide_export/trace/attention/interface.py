"""Makes every architecture emit one symbolic attention op per layer while it is traced.

`transformers` lets a named function compute attention (`AttentionInterface`) and the mask (`AttentionMaskInterface`).
This one emits a `tide::TideAttention` node: rotated query [B, H, S, Dh], unrepeated key and value [B, H_kv, S, Dh], and
where the model has them a sink logit per head [H] and biases by distance [B, H, S, R] -> [B, S, H, Dh]; causal by
definition. `compose` connects the node to its K/V cache, `lower` replaces it by the target's attention. A model that
never calls the interface emits no node, and `tracer` refuses it.
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
from tide_export.names.operators import OP_ATTENTION
from tide_export.trace.attention.distances import by_distance
from tide_export.trace.attention.indexed import chosen_keys, without_indexers
from tide_export.trace.attention.masks import Mask, refuse_additions
from tide_export.trace.running_layer import RUNNING
from tide_export.trace.symbolic import symbolic

IMPLEMENTATION = "tide_export"
HEAD_DIM_STEP = 8  # kernels read whole vectors; ONNX Runtime's requires a multiple of 8


@contextmanager
def symbolic_attention(model: PreTrainedModel, masks: Sequence[Mask | None]) -> Iterator[None]:
    """While open, `model` emits symbolic attention instead of computing it.

    Args:
        masks: of its layers, from `layer_masks`. Attention in blocks is traced as causal attention, which it is for
            sequences of one block; `pipeline.contents.context_length` allows no longer ones.

    Raises:
        UnsupportedModelError: the architecture accepts no other attention than its default.
    """
    AttentionInterface.register(IMPLEMENTATION, emitter(masks))
    mask = Mask("causal") if chosen_keys(model) else None  # indexers slice it
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: mask)
    with attention_implementation(model, IMPLEMENTATION), without_indexers(model), by_distance(model):
        yield


def emitter(masks: Sequence[Mask | None]) -> Callable:
    """The function `transformers` calls, with its signature, for a model whose layers have these masks."""

    def emit_attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        refuse_additions(module, {"position_bias": position_bias, **kwargs})
        batch, heads, length, query_dim = query.shape
        value_dim = value.shape[-1]
        # One width for all three: zeros in queries and keys add nothing to a product, those in values are sliced off.
        # DeepSeek's latent attention has wider keys than values.
        head_dim = -(-max(query_dim, value_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP
        query, key, value = (
            functional.pad(t, (0, head_dim - t.shape[-1])) if t.shape[-1] < head_dim else t for t in (query, key, value)
        )
        running = RUNNING.get()
        layer = int(getattr(module, "layer_idx", -1)) if running is None else running
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
        inputs = [query, key, value, s_aux, None, position_bias]
        while inputs[-1] is None:
            inputs.pop()
        output = symbolic(OP_ATTENTION, inputs, attributes, (batch, length, heads, head_dim))
        return output[..., :value_dim] if value_dim < head_dim else output, None

    return emit_attention


def refuse_ignored_attention(model: PreTrainedModel, traced: int, layers: int) -> None:
    """Checks that a trace holds attention ops of as many layers as the model has.

    Raises UnsupportedModelError.
    """
    if traced == 0:
        raise UnsupportedModelError(does_not_use_interface(model))
    if traced != layers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the trace holds attention of {traced} of {layers} layers; "
            "layers without attention cannot be exported"
        )
