"""Reads EAGLE-3 heads (Li et al. 2025, https://arxiv.org/abs/2503.01840).

Layouts: of EAGLE, SpecForge (specforge/modeling/draft/llama3_eagle.py), AngelSlim and NVIDIA; and of the package
`speculators` (src/speculators/models/eagle3/core.py), also quantized.

For a token with embedding x after a position with hidden states a, b, c after three of the model's layers:

    s = fc [a; b; c]
    z = residual + attention([rms(x) * input_layernorm; rms(s) * hidden_norm])
    z = z + mlp(rms(z) * post_attention_layernorm)
    logits = lm_head (rms(z) * norm),  next s = z

The residual is s, or the normalized s (`norm_before_residual`). With `norm_before_fc`, s = fc (rms([a; b; c]) *
input_norm). Logits are of a vocabulary of its own; `d2t` has each
token's id in the model's less its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from tide_export.common.progress import quiet_transformers
from tide_export.drafting.heads.files import head_config, head_folder, head_weights
from tide_export.drafting.heads.head import DraftHead, check_embedding, load_step
from tide_export.errors import DraftError, first_line
from tide_export.model.source import SourceModel

SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
    *("attention_bias", "mlp_bias"),
)
LAYER = "midlayer."  # its name in EAGLE's layout; `speculators` says `layers.0.`
SPECULATORS_LAYER = "layers.0."


class Eagle3Step(LlamaPreTrainedModel):
    """The head's layer and output head, with the parameters' names of EAGLE's layout."""

    def __init__(self, config: LlamaConfig, vocabulary: int, norm_before_residual: bool, query_norms: bool):
        super().__init__(config)
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.midlayer = nn.Module()
        attention: Any = Qwen3Attention if query_norms else LlamaAttention
        self.midlayer.self_attn = attention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.midlayer.self_attn, name)
            wide = nn.Linear(2 * width, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.midlayer.self_attn, name, wide)
        self.midlayer.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(width, epsilon))
        self.norm = LlamaRMSNorm(width, epsilon)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.midlayer
        normalized = layer.hidden_norm(hidden)
        residual = normalized if self.norm_before_residual else hidden
        attended, _ = layer.self_attn(
            torch.cat([layer.input_layernorm(embeddings), normalized], -1),
            position_embeddings=self.rotary_emb(hidden, position_ids),
            attention_mask=None,
        )
        z = residual + attended
        z = z + layer.mlp(layer.post_attention_layernorm(z))
        return self.lm_head(self.norm(z)), z


def read_eagle3(name: str, source: SourceModel) -> DraftHead:
    """Reads the EAGLE-3 head `name`, a folder or hub id, for the model `source`.

    Raises:
        DraftError: it cannot be read, has another layout, or belongs to another model.
    """
    folder = head_folder(name)
    config = head_config(folder, name)
    _check_config(config, name, source)
    stored = head_weights(folder, name, config.get("quantization_config"))
    weights = {key.replace(SPECULATORS_LAYER, LAYER, 1): value for key, value in stored.items()}
    check_embedding(weights.pop("embed_tokens.weight", None), f"draft head {name!r}", source)
    offsets, fc = weights.pop("d2t", None), weights.pop("fc.weight", None)
    norm = weights.pop("input_norm.weight", None)
    weights.pop("t2d", None)
    width = int(config["hidden_size"])
    if fc is None or tuple(fc.shape) != (width, 3 * width):
        what = "none" if fc is None else f"one of {list(fc.shape)}"
        raise DraftError(f"draft head {name!r} must have a weight fc.weight of {[width, 3 * width]}, and has {what}")
    tokens, order = draft_tokens(weights.get("lm_head.weight"), offsets, name, source).sort()
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    step = _step(config, weights, name)
    fc, epsilon = fc.float(), None
    if bool(config.get("norm_before_fc")) != (norm is not None) or (norm is not None and norm.shape != fc.shape[1:]):
        raise DraftError(
            f"draft head {name!r} must have a weight input_norm.weight of [{3 * width}] where its config.json says "
            "norm_before_fc, and only there: download it again"
        )
    if norm is not None:
        fc, epsilon = fc * norm.float(), float(step.config.rms_norm_eps)
    if not bool(torch.isfinite(fc).all()):
        raise DraftError(f"draft head {name!r}: weight fc.weight holds NaN or infinity")
    layers = _layers(config, name, source)
    return DraftHead("EAGLE-3", name, step, step, tokens.numpy(), layers=layers, fc=fc, fc_epsilon=epsilon)


def _check_config(config: Mapping[str, Any], name: str, source: SourceModel) -> None:
    if config.get("num_hidden_layers", 1) != 1:
        raise DraftError(
            f"draft head {name!r} has {config['num_hidden_layers']} layers, and only heads of one are read"
        )
    check_sizes(config, name, source)
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict) and eagle.get("use_aux_hidden_state") is False:
        raise DraftError(f"draft head {name!r} reads one hidden state of the model, not three: it is no EAGLE-3 head")


def check_sizes(config: Mapping[str, Any], name: str, source: SourceModel) -> None:
    """Checks that the head's hidden size and vocabulary are the model's; raises DraftError."""
    widths = {config.get("hidden_size"), config.get("target_hidden_size") or config.get("hidden_size")}
    if widths != {source.hidden_size} or source.normalized_size != source.hidden_size:
        raise DraftError(
            f"draft head {name!r} is not for this model: its hidden size is {config.get('hidden_size')}, "
            f"the model's {source.hidden_size}"
        )
    vocabulary = config.get("target_vocab_size") or config.get("vocab_size")
    if vocabulary != source.vocab_size:
        raise DraftError(
            f"draft head {name!r} is not for this model: its vocabulary has {vocabulary} tokens, the model's "
            f"{source.vocab_size}"
        )


def draft_tokens(
    head: torch.Tensor | None, offsets: torch.Tensor | None, name: str, source: SourceModel
) -> torch.Tensor:
    """The model's token id of each row of the output head; raises DraftError."""
    if head is None or not len(head) or (offsets is not None and offsets.shape != head.shape[:1]):
        raise DraftError(
            f"draft head {name!r} must have a weight lm_head.weight, and a number of d2t for each row of it"
        )
    tokens = torch.arange(len(head)) + (0 if offsets is None else offsets.long())
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < source.vocab_size:
        raise DraftError(f"draft head {name!r} proposes tokens that the model does not have: d2t is not for it")
    if len(tokens.unique()) != len(tokens):
        raise DraftError(f"draft head {name!r} has several rows for one token: its d2t is damaged, download it again")
    return tokens


def _layers(config: Mapping[str, Any], name: str, source: SourceModel) -> tuple[int, ...]:
    """The layers of the model, after which the head reads hidden states.

    At the top of a config (`speculators`, vLLM) the numbers count layers that have run; in `eagle_config` (SpecForge,
    NVIDIA, SGLang) they are of the layers themselves, from 0.
    """
    depth, key = source.num_layers, "eagle_aux_hidden_state_layer_ids"
    try:
        of_layers = (config.get("eagle_config") or {}).get(key)
        layers = config.get(key) or [int(number) + 1 for number in of_layers or ()] or (2, depth // 2, depth - 3)
        layers = tuple(int(count) for count in layers)
    except (TypeError, ValueError, AttributeError) as error:
        raise DraftError(f"the config.json of draft head {name!r} has no usable {key}: {first_line(error)}") from error
    if len(layers) != 3 or not all(1 <= count <= depth for count in layers):
        raise DraftError(
            f"draft head {name!r} reads hidden states after layers {', '.join(map(str, layers))}, and the model has "
            f"{depth}"
        )
    return layers


def _step(config: Mapping[str, Any], weights: dict[str, torch.Tensor], name: str) -> PreTrainedModel:
    try:
        sizes = {key: config[key] for key in SIZES if config.get(key) is not None}
        with quiet_transformers():
            llama = LlamaConfig(**sizes, vocab_size=len(weights["lm_head.weight"]))
            llama._attn_implementation = "sdpa"  # which is causal without a mask
            query_norms = f"{LAYER}self_attn.q_norm.weight" in weights
            norm_before_residual = bool(config.get("norm_before_residual"))
            step = Eagle3Step(llama, len(weights["lm_head.weight"]), norm_before_residual, query_norms)
    except Exception as error:  # transformers checks a config in many ways
        raise DraftError(f"the config.json of draft head {name!r} cannot be used: {first_line(error)}") from error
    load_step(step, weights, name, "EAGLE-3")
    return step
