"""Reads the MTP layer in a model's own checkpoint, in the layouts that are published.

Such a layer reads what the model's head reads of a position, after the final norm, and the next token's embedding
(DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437):

    z = decoder layer (fc [rms(embedding) * embedding norm; rms(state) * state norm])
    next state = rms(z) * norm,  logits = the model's head of the next state

The decoder layer is of the model's own kind, with its rotary angles; a norm multiplies by 1 + weight where the model's
do. `LAYOUTS` has the names; transformers' `MtpModel` runs them. The first layer is read; further drafts are made by the
same layer from its own states.

Sources: the README_WEIGHTS of DeepSeek-V3; vLLM's deepseek_mtp.py, qwen3_next_mtp.py and qwen3_5_mtp.py; that the state
is the normalized one: llama.cpp#24025.
"""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files
from transformers.utils.generic import ContextManagers

from tide_export.common.progress import quiet_transformers
from tide_export.drafting.heads.head import CAUSAL, DraftHead, check_embedding, check_loaded
from tide_export.errors import DraftError, TideError, first_line
from tide_export.model.paths import is_gguf
from tide_export.model.quantized_files import dequantized
from tide_export.model.source import SourceModel
from tide_export.trace.attention.masks import Mask
from tide_export.trace.passthrough_cache import passthrough_cache

# The name of `fc`, whose prefix is that of all weights, and what else has the prefix but is of a further layer.
LAYOUTS = (
    (r"(?P<prefix>(?:.*\.)?layers\.{depth}\.)eh_proj\..*", None),  # DeepSeek, GLM: after the model's layers
    (r"(?P<prefix>mtp\.)fc\..*", r"layers\.[1-9]"),  # Qwen, Mellum: beside the model
)
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # the model's own


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


def mtp_weights(source: SourceModel) -> dict[str, str]:
    """Returns the file of each weight of the first MTP layer of the checkpoint of `source`; empty: none."""
    if is_gguf(source.name):
        return {}
    try:
        files, index = _get_resolved_checkpoint_files(source.name, None, None, True, None, False)
    except OSError:  # no safetensors
        return {}
    files = files or []
    if index is not None:
        paths = {Path(file).name: file for file in files}
        names = {name: paths[file] for name, file in index["weight_map"].items()}
    else:
        with safe_open(files[0], framework="pt") as opened:
            names = dict.fromkeys(opened.keys(), files[0])
    for fc, others in LAYOUTS:
        pattern = re.compile(fc.replace("{depth}", str(source.num_layers)))
        for found in filter(None, map(pattern.fullmatch, names)):
            prefix = found["prefix"]
            own = {name: file for name, file in names.items() if name.startswith(prefix)}
            return {name: file for name, file in own.items() if not re.match(others or "$", name.removeprefix(prefix))}
    return {}


def read_mtp(source: SourceModel) -> DraftHead:
    """Reads the first MTP layer of the model that `source` was loaded from.

    Raises:
        DraftError: it has none, or one that cannot be read.
    """
    name, files = source.name, mtp_weights(source)
    if not files:
        raise DraftError(
            f"model {name!r} has no MTP layer of a layout that is known: give the folder of an EAGLE-3 head"
        )
    try:
        with quiet_transformers():
            config, _ = PretrainedConfig.get_config_dict(name)
            quantization = (config | config.get("text_config", {})).get("quantization_config")
            weights = dequantized(_tensors(files), quantization, f"model {name!r}")
            check_embedding(_embedding(weights), f"the MTP layer of model {name!r}", source)
            model = _empty(source, weights)
            names: Any = model.get_weight_conversions(source.model)
            loading = LoadStateDictConfig(weight_mapping=names, dtype=torch.float32)
            info, _ = convert_and_load_state_dict_in_model(model, weights, loading)
    except DraftError:
        raise
    except Exception as error:  # transformers raises many kinds
        reason = str(error) if isinstance(error, TideError) else first_line(error)
        raise DraftError(f"the MTP layer of model {name!r} cannot be read: {reason}") from error
    check_loaded(model.layers, vars(info), f"the MTP layer of model {name!r}", ("embed_tokens.", "shared_head."))
    if any(parameter.is_meta for parameter in model.shared_head.parameters()):
        model.shared_head = _head(source)
    model.embed_tokens = nn.Identity()  # its embeddings are given
    if model.config.hidden_size != source.normalized_size:
        raise DraftError(f"the MTP layer of model {name!r} reads other states than its head")
    step = MtpStep(model.eval().requires_grad_(False))
    return DraftHead("MTP", name, step, model, np.arange(source.vocab_size), (_mask(model, name),))


def _tensors(files: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors = dict[str, torch.Tensor]()
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in files if files[name] == file}
    return tensors


def _embedding(weights: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Takes what the layer shares with the model out of `weights`; returns its embedding, if any."""
    shared = {name: weights.pop(name) for name in list(weights) if name.endswith(SHARED)}
    return next((weight for name, weight in shared.items() if name.endswith(SHARED[0])), None)


def _empty(source: SourceModel, weights: dict[str, torch.Tensor]) -> MtpModel:
    """Makes a layer without numbers.

    It has the attention that `mtp_layer_types` says, or full attention, and experts where `weights` have some.
    """
    model, config = source.model, deepcopy(source.model.config)
    text = config.get_text_config(decoder=True)
    text.num_mtp_layers = 1
    text.mtp_layer_types = list(getattr(text, "mtp_layer_types", None) or ["full_attention"])[:1]
    text.mtp_mlp_layer_types = ["sparse" if any(".experts." in name for name in weights) else "dense"]
    before, model.config = model.config, config
    try:
        with ContextManagers(MtpModel.get_init_context(torch.float32, False, False, None)):
            return MtpModel(model, 1)
    finally:
        model.config = before


def _head(source: SourceModel) -> nn.Linear:
    """The model's head, if its numbers are not in memory."""
    rows = source.head_rows()
    if rows is None:
        raise DraftError(f"the MTP layer of model {source.name!r} cannot be read: the model's head is no matrix")
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows)
    return head


def _mask(model: MtpModel, name: str) -> Mask:
    kind = (getattr(model.config, "layer_types", None) or ["full_attention"])[0]
    if kind == "full_attention":
        return CAUSAL
    if kind == "sliding_attention":
        return Mask("window", int(model.config.sliding_window))
    raise DraftError(f"the first MTP layer of model {name!r} is of type {kind!r}, which cannot be exported")
