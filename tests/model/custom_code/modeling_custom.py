"""A small causal LM with an attention class of its own, which uses transformers' interface."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_custom import CustomConfig


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class CustomAttention(nn.Module):
    def __init__(self, config: CustomConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, attention_mask, past_key_values):
        batch, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.out(attended.reshape(batch, length, width))


class CustomLayer(nn.Module):
    def __init__(self, config: CustomConfig, layer_idx: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attention = CustomAttention(config, layer_idx)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, hidden, attention_mask, past_key_values):
        hidden = hidden + self.attention(self.norm_1(hidden), attention_mask, past_key_values)
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


class CustomPreTrainedModel(PreTrainedModel):
    config_class = CustomConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class CustomModel(CustomPreTrainedModel):
    def __init__(self, config: CustomConfig):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(CustomLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs
    ):
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        for layer in self.layers:
            hidden = layer(hidden, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


class CustomForCausalLM(CustomPreTrainedModel, GenerationMixin):
    def __init__(self, config: CustomConfig):
        super().__init__(config)
        self.model = CustomModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, **kwargs):
        output = self.model(input_ids, attention_mask=attention_mask, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept, :])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)
