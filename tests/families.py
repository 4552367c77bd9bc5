"""Tiny seeded models, one per family, with the family's own features on and every parameter randomised."""

import torch
import transformers as tf

from tide_export.model import SourceModel, wrap_model

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
GPT = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Windows are shorter than the test sequences, so that a lost window shows.
FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**HEADS),
    "llama3-rope": lambda: tf.LlamaConfig(
        **HEADS,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: tf.Qwen2Config(**GROUPED),
    "qwen3": lambda: tf.Qwen3Config(**HEADS),
    "mistral": lambda: tf.MistralConfig(**GROUPED, sliding_window=8),
    "gemma": lambda: tf.GemmaConfig(**HEADS),
    "gemma2": lambda: tf.Gemma2Config(**HEADS, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "gemma3": lambda: tf.Gemma3TextConfig(**HEADS, sliding_window=8, query_pre_attn_scalar=16),
    "gpt2": lambda: tf.GPT2Config(**GPT),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**SIZES),
    "opt": lambda: tf.OPTConfig(
        vocab_size=512,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
    ),
    "phi3": lambda: tf.Phi3Config(**GROUPED),
    "granite": lambda: tf.GraniteConfig(
        **GROUPED, logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0
    ),
}

# Families that do not compute attention through the interface: tracing must refuse them, not go wrong.
REFUSED = {
    "bloom": lambda: tf.BloomConfig(vocab_size=512, hidden_size=64, n_layer=4, n_head=4),
    "falcon": lambda: tf.FalconConfig(vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4),
    "gptj": lambda: tf.GPTJConfig(**GPT, rotary_dim=8),
}


def build(config) -> SourceModel:
    """A model of `config`; norms, biases and all are random, so that a parameter left out changes the result."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "weight" in name else 0.0))
            else:
                parameter.mul_(3.0)  # the default scale leaves attention almost uniform
    return wrap_model(model, config.model_type)
