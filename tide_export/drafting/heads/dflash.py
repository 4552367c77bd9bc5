"""Reads DFlash heads, which draft a block of tokens in one run (https://github.com/z-lab/dflash).

For rows with hidden states a, b, ... after some of the model's layers, and a block of the last token, whose embedding
is x, and as many masks, at the positions after these rows:

    c = rms(fc [a; b; ...]) * hidden_norm
    z = [x, mask, mask, ...]
    in each layer:  n = rms(z) * input_layernorm
                    z = z + attention(queries of n, keys and values of [c; n])
                    z = z + mlp(rms(z) * post_attention_layernorm)
    logits = the model's head of (rms(z) * norm), of the masks: the tokens in their places

Every token of a block attends to all rows and to the whole block. Embedding and head are the model's, the layers are
Qwen3's.

Sources: dflash/model.py of z-lab; src/speculators/models/dflash of `speculators`, whose heads may have a vocabulary of
their own; SGLang's and vLLM's models, and eagle3_utils.py of the latter: how layers are counted.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from tide_export.common.progress import quiet_transformers
from tide_export.drafting.heads.eagle3 import SIZES, check_sizes, draft_tokens
from tide_export.drafting.heads.files import head_config, head_folder, head_weights
from tide_export.drafting.heads.head import CAUSAL, DraftHead, check_embedding, load_step
from tide_export.errors import DraftError, first_line
from tide_export.graph.rewriting import required
from tide_export.model.source import SourceModel

MAX_BLOCK = 64
READ = {
    *("mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "input_embedding_scale"),
    *("output_multiplier", "final_logit_softcapping"),
}
USUAL = ({"projector_type": "dflash"}, {"attention_mode": "gqa"})  # what other fields may say


class DFlashStep(Qwen3PreTrainedModel):
    """The head's layers and the model's head, with the parameters' names that are published.

    Args:
        fields: what `dflash_config` says.
        mask: the embedding of a mask, float32 [E].
    """

    mask: torch.Tensor

    def __init__(self, config: Qwen3Config, fields: Mapping[str, Any], mask: torch.Tensor, vocabulary: int):
        super().__init__(config)
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.block = int(fields["block_size"])
        self.scale = float(fields.get("input_embedding_scale") or 1)
        self.multiplier = float(fields.get("output_multiplier") or 1)
        self.softcap = float(fields.get("final_logit_softcapping") or 0)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        for layer in self.layers:
            attention: Any = layer.self_attn
            attention.num_key_value_groups *= self.block
            attention.is_causal = False
        self.hidden_norm, self.norm = Qwen3RMSNorm(width, epsilon), Qwen3RMSNorm(width, epsilon)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """`last` are the last rows of the blocks [1, R], which are rows after those of each sequence.

        As it stands, without K/V of earlier rows, it computes one sequence.
        """
        rows = self.hidden_norm(hidden).flatten(0, 1)
        block = last.flatten()[:, None] + torch.arange(1 - self.block, 1)
        first = embeddings.flatten(0, 1)[block[:, :1]]
        z = torch.cat([first, self.mask.expand(first.shape[0], self.block - 1, -1)], 1) * self.scale
        cos, sin = self.rotary_emb(hidden, position_ids.reshape(1, -1))
        angles = [table[0][block] for table in (cos, sin)]
        layer: Any
        for layer in self.layers:
            normalized = layer.input_layernorm(z)
            every = rows.index_put((block.flatten(),), normalized.flatten(0, 1))[None]
            z = z + self._attended(layer.self_attn, normalized, every, (cos, sin), angles)
            z = z + layer.mlp(layer.post_attention_layernorm(z))
        logits = self.lm_head(self.norm(z[:, 1:])) * self.multiplier
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def _attended(self, attention: Any, block: torch.Tensor, rows: torch.Tensor, tables: Any, angles: Any):
        """Attends from the blocks [R, B, D] to all rows [1, N, D]; a block's tokens are heads of one token."""
        count, size, _ = block.shape
        queries, keys, values = (
            projection(x).view(*x.shape[:2], -1, attention.head_dim)
            for projection, x in ((attention.q_proj, block), (attention.k_proj, rows), (attention.v_proj, rows))
        )
        queries = _rotated(attention.q_norm(queries).transpose(1, 2), *angles)
        heads = queries.shape[1]
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, _ = attend(
            attention,
            queries.flatten(1, 2).transpose(0, 1)[None],
            _rotated(attention.k_norm(keys).transpose(1, 2), *tables),
            values.transpose(1, 2),
            attention_mask=None,
            scaling=attention.scaling,
        )
        attended = attended.reshape(count, heads, size, attention.head_dim)
        return attention.o_proj(attended.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `x` [B, H, S, d] by the angles whose cosines and sines are [B, S, d]."""
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def is_dflash(config: Mapping[str, Any]) -> bool:
    return "dflash_config" in config or config.get("speculators_model_type") == "dflash"


def read_dflash(name: str, source: SourceModel) -> DraftHead:
    """Reads the DFlash head `name`, a folder or hub id, for the model `source`.

    Raises:
        DraftError: it cannot be read, has another layout, or belongs to another model.
    """
    folder = head_folder(name)
    config = head_config(folder, name)
    check_sizes(config, name, source)
    fields, layers = _fields(config, name, source)
    weights = head_weights(folder, name, config.get("quantization_config"))
    what = f"draft head {name!r}"
    check_embedding(weights.pop("embed_tokens.weight", None), what, source)
    offsets, fc, _ = (weights.pop(key, None) for key in ("d2t", "fc.weight", "t2d"))
    width = source.hidden_size
    if fc is None or tuple(fc.shape) != (width, len(layers) * width) or not bool(torch.isfinite(fc).all()):
        raise DraftError(
            f"{what} must have a weight fc.weight of {[width, len(layers) * width]} without NaN, and has not"
        )
    head = weights["lm_head.weight"] if "lm_head.weight" in weights else source.head_rows()
    tokens, order = draft_tokens(head, offsets, name, source).sort()
    weights["lm_head.weight"] = required(head)[order]
    embedding = source.model.get_input_embeddings()
    path = next(path for path, module in source.model.named_modules() if module is embedding)
    mask = source.weight(f"{path}.weight")[int(fields["mask_token_id"])].clone()
    try:
        sizes = {key: config[key] for key in (*SIZES, "num_hidden_layers") if config.get(key) is not None}
        with quiet_transformers():
            qwen = Qwen3Config(**sizes, vocab_size=len(order))
            qwen._attn_implementation = "sdpa"
            step = DFlashStep(qwen, fields, mask, len(order))
    except Exception as error:  # transformers checks a config in many ways
        raise DraftError(f"the config.json of {what} cannot be used: {first_line(error)}") from error
    load_step(step, weights, name, "DFlash")
    masks = (CAUSAL,) * len(step.layers)
    return DraftHead("DFlash", name, step, step, tokens.numpy(), masks, layers, fc.float(), block_size=step.block)


def _fields(config: Mapping[str, Any], name: str, source: SourceModel) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns the fields of `dflash_config`, or of `speculators`, and after which layers states are read."""
    try:
        fields = {key: config[key] for key in ("block_size", "mask_token_id") if config.get(key) is not None}
        fields |= dict(config.get("dflash_config") or {})
        counts = config.get("aux_hidden_state_layer_ids") or [int(at) + 1 for at in fields["target_layer_ids"]]
        layers = tuple(int(count) for count in counts)
        block, mask = int(fields["block_size"]), int(fields["mask_token_id"])
        depth = int(fields.get("num_target_layers") or config.get("num_target_layers") or source.num_layers)
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    except (KeyError, TypeError, ValueError) as error:
        raise DraftError(
            f"the config.json of draft head {name!r} has no usable block_size, mask_token_id and target_layer_ids: "
            f"{first_line(error)}"
        ) from error
    odd = [key for key, value in fields.items() if value and key not in READ and {key: value} not in USUAL]
    odd += [key for key in ("is_causal", "sample_from_anchor", "shift_label") if config.get(key)]
    for field in [*odd, *(f"layers of {kind}" for kind in sorted(kinds))]:
        raise DraftError(f"draft head {name!r} has {field}, and only DFlash heads without it are read: use draft")
    if depth != source.num_layers or not layers or not all(1 <= count < depth for count in layers):
        raise DraftError(
            f"draft head {name!r} is not for this model: it reads hidden states after layers "
            f"{', '.join(map(str, layers))} of {depth}, and the model has {source.num_layers}"
        )
    if not (2 <= block <= MAX_BLOCK and 0 <= mask < source.vocab_size):
        raise DraftError(
            f"draft head {name!r} has blocks of {block} tokens with mask {mask}: only 2 to {MAX_BLOCK} tokens with a "
            f"mask below {source.vocab_size} are read"
        )
    return fields, layers
