"""Reads the MTP layers of a model's own files.

transformers' `MtpModel` knows their layouts.

Such a layer reads what the model's head reads of a position, and the next token's embedding (DeepSeek-AI 2024,
https://arxiv.org/abs/2412.19437). The first one is read; the same layer makes further drafts from its own.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_layers import MtpModel

from tide_export.common.progress import quiet_transformers
from tide_export.drafting.heads.head import CAUSAL, DraftHead
from tide_export.errors import DraftError, first_line
from tide_export.model.source import SourceModel
from tide_export.trace.attention.masks import Mask
from tide_export.trace.passthrough_cache import passthrough_cache


class MtpStep(nn.Module):
    """The first layer of `model` and the head."""

    def __init__(self, model: MtpModel):
        super().__init__()
        self.model = model

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache: Any = passthrough_cache(1)
        hidden = self.model.forward_layer(0, hidden, position_ids, cache, inputs_embeds=embeddings)
        return self.model._project_to_logits(hidden), hidden


def read_mtp(source: SourceModel) -> DraftHead:
    """Reads the first MTP layer of the model that `source` was loaded from.

    Raises:
        DraftError: it has none, or one that cannot be read.
    """
    name = source.name
    if not getattr(source.text_config, "num_mtp_layers", None):
        raise DraftError(
            f"model {name!r} has no MTP layers that transformers knows: give the folder of an EAGLE-3 head"
        )
    try:
        with quiet_transformers():
            quantized = PretrainedConfig.get_config_dict(name)[0].get("quantization_config")
            model = None if quantized else MtpModel.from_pretrained(source.model)
    except Exception as error:  # transformers raises many kinds
        raise DraftError(f"the MTP layers of model {name!r} cannot be read: {first_line(error)}") from error
    if model is None:
        raise DraftError(f"model {name!r} is quantized, and its MTP layers can then not be read")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise DraftError(f"the MTP layers of model {name!r} need its head in memory: export without a device map")
    if model.config.hidden_size != source.normalized_size:
        raise DraftError(f"the MTP layers of model {name!r} read other hidden states than its head")
    step = MtpStep(model.eval().requires_grad_(False))
    return DraftHead("MTP", name, step, model, np.arange(source.vocab_size), _mask(model, name))


def _mask(model: MtpModel, name: str) -> Mask:
    kind = (getattr(model.config, "layer_types", None) or ["full_attention"])[0]
    if kind == "full_attention":
        return CAUSAL
    if kind == "sliding_attention":
        return Mask("window", int(model.config.sliding_window))
    raise DraftError(f"the first MTP layer of model {name!r} is of type {kind!r}, which cannot be exported")
