"""A small causal LM of Ouro's layout (arXiv 2510.25741), written from its description.

The same layers run `total_ut_steps` times, with keys and values of each time; the final norm follows every loop, and
what it gives is the next loop's input; every sublayer has a norm before and one after it; a gate reads the normalized
states of each loop. The backbone returns all of them beside its output, and the model's forward reads the logits off
the first loop at which the cumulative exit probability reaches the threshold, if there is one.
"""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_looped import LoopedConfig


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    key, value = (one.repeat_interleave(module.num_key_value_groups, dim=1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def rotate(states, cos, sin):
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class LoopedRMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states):
        states = hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * states.to(hidden_states.dtype)


class LoopedAttention(nn.Module):
    def __init__(self, config: LoopedConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, current_ut):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (rotate(one, *position_embeddings) for one in (query, key))
        if past_key_values is not None:
            number = current_ut * self.config.num_hidden_layers + self.layer_idx
            key, value = past_key_values.update(key, value, number)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1))


class LoopedMLP(nn.Module):
    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class LoopedDecoderLayer(nn.Module):
    def __init__(self, config: LoopedConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LoopedAttention(config, layer_idx)
        self.mlp = LoopedMLP(config)
        self.input_layernorm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm_2 = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_value=None, current_ut=0):
        attended = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask, past_key_value, current_ut
        )
        hidden_states = hidden_states + self.input_layernorm_2(attended)
        return hidden_states + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden_states)))


class LoopedPreTrainedModel(PreTrainedModel):
    config_class = LoopedConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class LoopedModel(LoopedPreTrainedModel):
    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LoopedDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.total_ut_steps = config.total_ut_steps
        if config.gate_width:
            self.early_exit_gate = nn.Linear(config.hidden_size, config.gate_width)
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs
    ):
        hidden_states = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + input_ids.shape[1], device=input_ids.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        size = self.config.hidden_size // self.config.num_attention_heads
        rates = self.config.rope_theta ** -(torch.arange(0, size, 2, device=input_ids.device).float() / size)
        angles = position_ids[..., None].float() * rates
        angles = torch.cat((angles, angles), dim=-1)
        embeddings = angles.cos(), angles.sin()

        loops, gates = [], []
        for current_ut in range(self.total_ut_steps):
            for layer in self.layers[: self.config.num_hidden_layers]:
                hidden_states = layer(
                    hidden_states,
                    position_embeddings=embeddings,
                    attention_mask=mask,
                    past_key_value=past_key_values,
                    current_ut=current_ut,
                )
            hidden_states = self.norm(hidden_states)
            if self.config.gate_width:
                loops.append(hidden_states)
                gates.append(self.early_exit_gate(hidden_states))
        output = BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)
        return output, loops, gates


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # if the config ties them

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.model = LoopedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.early_exit_step = getattr(config, "early_exit_step", None)
        self.early_exit_threshold = getattr(config, "early_exit_threshold", None)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, exit_at_step=None, **kwargs):
        exit_at_step = self.early_exit_step if exit_at_step is None else exit_at_step
        output, loops, gates = self.model(input_ids, attention_mask=attention_mask, **kwargs)
        states = output.last_hidden_state
        if loops and exit_at_step is not None:
            states = loops[exit_at_step]
        elif loops and self.early_exit_threshold is not None:
            reached, left = [], torch.ones_like(gates[0][..., 0])
            for gate in gates[:-1]:
                left = left * (1.0 - torch.sigmoid(gate[..., 0]))
                reached.append(1.0 - left >= self.early_exit_threshold)
            reached.append(torch.ones_like(reached[0]))
            chosen = torch.stack(reached, dim=2).float().argmax(dim=2)
            index = chosen[..., None, None].expand(-1, -1, 1, states.shape[-1])
            states = torch.stack(loops, dim=2).gather(2, index).squeeze(2)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept, :])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)
