"""Tiny seeded models, one row per family, with the family's features on and every parameter randomised.

The parity tests and `tools/checks/model_families.py`, which writes docs/reference/models.md, run these rows. One that
cannot be exported has in `refused` a part of the sentence that names the reason (`refused_families`). To add a family,
add a row here, or in `further_families` or `rare_families`, of two layers if it repeats what others have. Models with
recurrent states are in `hybrid_families`, those that read more than text in `multimodal_families`. Every class that
AutoModelForCausalLM loads must have a row, or a reason in `refused_families.UNBUILT`.
"""

import torch
import transformers as tf
from covering import covering, pairs
from further_families import FURTHER
from hybrid_families import HYBRID
from multimodal_families import MULTIMODAL
from rare_families import RARE
from refused_families import REFUSED_ROWS, UNBUILT  # noqa: F401 (for tools/checks/model_families.py)
from tiny_configs import (
    CONTEXT,
    EXPERTS,
    FALCON,
    GPT,
    GROUPED,
    HEADS,
    LATENT,
    LAYERS,
    LLAMA3,
    LONGROPE,
    SCALED_LONGROPE,
    SIZES,
    TINY,
    TWO_SLIDING,
    VISION,
    WINDOW,
    YARN,
    Family,
    rope,
)
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

from tide_export.model.attention import reference_attention
from tide_export.model.source import SourceModel, auto_class, wrap_model

DBRX_ATTENTION = DbrxAttentionConfig(kv_n_heads=2, clip_qkv=0.5)
DBRX_ATTENTION.rope_theta = 10000.0  # which its class does not take and its model reads
PER_LAYER = ("per-layer embeddings", "K/V shared by layers")
OTHERS = {**HYBRID, **FURTHER, **RARE, **MULTIMODAL, **REFUSED_ROWS}
FAMILIES: dict[str, Family] = {
    "llama": Family(lambda: tf.LlamaConfig(**HEADS), ("grouped queries",)),
    "llama (3.1)": Family(
        lambda: tf.LlamaConfig(**HEADS, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **LLAMA3),
        ("llama3 rotary scaling", "biases", "tied embeddings"),
    ),
    "llama (linear)": Family(lambda: tf.LlamaConfig(**HEADS, **rope("linear", factor=4.0)), ("linear rotary scaling",)),
    "llama (dynamic)": Family(
        lambda: tf.LlamaConfig(**HEADS, **rope("dynamic", factor=4.0)),
        ("dynamic rotary scaling",),
        note="up to max_position_embeddings, where dynamic scaling begins",
    ),
    "llama4 (text)": Family(
        lambda: tf.Llama4TextConfig(
            **HEADS,
            intermediate_size_mlp=96,
            **{**EXPERTS, "num_experts_per_tok": 1},
            interleave_moe_layer_step=2,
            attention_chunk_size=192,
            no_rope_layers=[1, 0, 1],
            floor_scale=16,
            attn_scale=0.5,
        ),
        ("experts", "q/k norms", "attention in blocks", "layers without rotary", "query scaling by position"),
        note="up to attention_chunk_size tokens; every token runs all experts, as in transformers",
    ),
    "llama4": Family(
        lambda: tf.Llama4Config(
            text_config={
                **HEADS,
                "intermediate_size_mlp": 96,
                **EXPERTS,
                "attention_chunk_size": 192,
                "no_rope_layers": [1, 1, 0],
            },
            vision_config={**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        ),
        ("text model inside ForConditionalGeneration", "experts"),
        note="its text model, through Llama4ForCausalLM",
    ),
    "deepseek_v3": Family(
        lambda: tf.DeepseekV3Config(
            **SIZES,
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            **LATENT,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        ),
        ("latent attention", "experts", "shared experts", "yarn rotary scaling"),
        note="K and V are stored decompressed, at the width of the keys",
    ),
    # Two attentions in a layer, one after the other, and experts that compute nothing.
    "longcat_flash": Family(
        lambda: tf.LongcatFlashConfig(
            **{**TINY, **LATENT, "head_dim": 8, "max_position_embeddings": CONTEXT},
            **{"num_layers": 2, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32},
            **{"moe_topk": 2, "n_routed_experts": 8, "zero_expert_num": 4},
        ),
        ("several attentions in a layer", "latent attention", "experts"),
        layers=2,
    ),
    "qwen2": Family(
        lambda: tf.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        ("biases", "sliding window", "per-layer types"),
    ),
    "qwen3": Family(lambda: tf.Qwen3Config(**HEADS, **YARN), ("q/k norms", "yarn rotary scaling")),
    "qwen3_moe": Family(
        lambda: tf.Qwen3MoeConfig(
            **HEADS,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
        ("experts", "q/k norms", "per-layer types"),
    ),
    "mistral": Family(lambda: tf.MistralConfig(**GROUPED, sliding_window=WINDOW), ("sliding window",)),
    "mistral3": Family(
        lambda: tf.Mistral3Config(
            text_config={"model_type": "mistral", **HEADS, "sliding_window": None},
            vision_config={"model_type": "pixtral", **VISION, "head_dim": 16},
        ),
        ("text model inside ForConditionalGeneration",),
    ),
    "mixtral": Family(
        lambda: tf.MixtralConfig(**GROUPED, **EXPERTS, sliding_window=WINDOW), ("experts", "sliding window")
    ),
    # Its experts do not use transformers' interface.
    "dbrx": Family(
        lambda: tf.DbrxConfig(
            vocab_size=512,
            d_model=64,
            n_heads=4,
            n_layers=LAYERS,
            max_seq_len=CONTEXT,
            attn_config=DBRX_ATTENTION,
            ffn_config=DbrxFFNConfig(hidden_size=64, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
        ),
        ("experts", "packed projections"),
    ),
    "gemma": Family(lambda: tf.GemmaConfig(**HEADS), ("embedding scale", "tied embeddings")),
    "gemma2": Family(
        lambda: tf.Gemma2Config(
            **HEADS,
            sliding_window=WINDOW,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            query_pre_attn_scalar=16,
            layer_types=TWO_SLIDING,
        ),
        ("softcaps", "sliding window", "per-layer types"),
    ),
    "gemma3 (text)": Family(
        lambda: tf.Gemma3TextConfig(
            **HEADS,
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
            layer_types=TWO_SLIDING,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        ),
        ("q/k norms", "sliding window", "per-layer types", "linear rotary scaling"),
    ),
    "gemma3": Family(
        lambda: tf.Gemma3Config(
            text_config={**HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": TWO_SLIDING},
            vision_config=VISION,
            mm_tokens_per_image=4,
        ),
        ("text model inside ForConditionalGeneration", "sliding window", "per-layer types"),
    ),
    "gemma3n (text)": Family(
        lambda: tf.Gemma3nTextConfig(
            **HEADS,
            sliding_window=WINDOW,
            final_logit_softcapping=3.0,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            num_kv_shared_layers=1,
            vocab_size_per_layer_input=480,
            hidden_size_per_layer_input=8,
            altup_num_inputs=3,
            laurel_rank=4,
            activation_sparsity_pattern=[0.5, 0.0, 0.5],
        ),
        (*PER_LAYER, "several hidden states of a token", "q/k norms", "softcaps", "sliding window", "per-layer types"),
    ),
    "gemma4 (text)": Family(
        lambda: tf.Gemma4TextConfig(
            **{**HEADS, "num_hidden_layers": 5},
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            sliding_window=WINDOW,
            final_logit_softcapping=3.0,
            # Layer 3 reads the keys of layer 2, in its own segment, and layer 4 those of layer 1, in another.
            layer_types=[*TWO_SLIDING, "sliding_attention", "full_attention"],
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=8,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        (*PER_LAYER, "experts", "q/k norms", "softcaps", "sliding window", "per-layer types"),
    ),
    "gpt2": Family(lambda: tf.GPT2Config(**GPT), ("learned positions", "biases", "tied embeddings")),
    "gpt_neox": Family(
        lambda: tf.GPTNeoXConfig(
            **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        ),
        ("partial rotary", "biases", "parallel residual"),
    ),
    "phi": Family(
        lambda: tf.PhiConfig(**GROUPED, qk_layernorm=True, **rope("default", partial_rotary_factor=0.5)),
        ("partial rotary", "q/k norms", "biases", "biased head", "parallel residual"),
    ),
    "phi3": Family(
        lambda: tf.Phi3Config(
            **GROUPED, sliding_window=WINDOW, original_max_position_embeddings=CONTEXT // 2, **LONGROPE
        ),
        ("longrope rotary scaling", "sliding window", "packed projections"),
        note="up to original_max_position_embeddings, where the long factors begin",
    ),
    "phi4 (partial)": Family(
        lambda: tf.Phi3Config(**GROUPED, **rope("default", partial_rotary_factor=0.75)), ("partial rotary",)
    ),
    "phimoe": Family(
        lambda: tf.PhimoeConfig(**GROUPED, **EXPERTS, **SCALED_LONGROPE, attention_bias=True, lm_head_bias=True),
        ("longrope rotary scaling", "experts", "biases", "biased head"),
        note="up to original_max_position_embeddings, where another factor begins",
    ),
    "opt": Family(
        lambda: tf.OPTConfig(
            vocab_size=512,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        ),
        ("learned positions", "biases", "tied embeddings"),
    ),
    "opt (350m)": Family(
        lambda: tf.OPTConfig(
            vocab_size=512,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            word_embed_proj_dim=32,
            do_layer_norm_before=False,
        ),
        ("learned positions", "biases", "project_in and project_out", "norms after", "no final norm"),
    ),
    "stablelm": Family(
        lambda: tf.StableLmConfig(
            **GROUPED, use_qkv_bias=True, qk_layernorm=True, **rope("default", partial_rotary_factor=0.25)
        ),
        ("partial rotary", "q/k norms", "biases"),
    ),
    "starcoder2": Family(
        lambda: tf.Starcoder2Config(**GROUPED, sliding_window=WINDOW), ("sliding window", "biases", "tied embeddings")
    ),
    "olmo2": Family(lambda: tf.Olmo2Config(**GROUPED), ("q/k norms", "norms after")),
    "cohere": Family(
        lambda: tf.CohereConfig(**GROUPED, logit_scale=0.25, use_qk_norm=True),
        ("logit scaling", "q/k norms", "interleaved rotary", "parallel residual", "tied embeddings"),
    ),
    "cohere2": Family(
        lambda: tf.Cohere2Config(**HEADS, logit_scale=0.25, sliding_window=WINDOW, layer_types=TWO_SLIDING),
        ("logit scaling", "sliding window", "per-layer types", "layers without rotary"),
    ),
    "granite": Family(
        lambda: tf.GraniteConfig(**GROUPED, logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0),
        ("logit scaling", "embedding scale"),
    ),
    "smollm3": Family(
        lambda: tf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1]), ("layers without rotary", "tied embeddings")
    ),
    "gpt_oss": Family(
        lambda: tf.GptOssConfig(**HEADS, **EXPERTS, sliding_window=WINDOW, layer_types=TWO_SLIDING, **YARN),
        ("attention sinks", "experts", "biases", "sliding window", "per-layer types", "yarn rotary scaling"),
    ),
    # These bypass the attention interface. Three heads: not a power of two, for which ALiBi has another formula.
    "gpt_neo": Family(
        lambda: tf.GPTNeoConfig(
            **TINY,
            num_layers=LAYERS,
            attention_types=[[["global", "local"], 1], [["local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=CONTEXT,
        ),
        ("sliding window", "per-layer types", "learned positions", "tied embeddings"),
    ),
    "gptj": Family(
        lambda: tf.GPTJConfig(**GPT, rotary_dim=8),
        ("interleaved rotary", "partial rotary", "parallel residual", "biased head"),
    ),
    "codegen": Family(
        lambda: tf.CodeGenConfig(**GPT, rotary_dim=8),
        ("interleaved rotary", "partial rotary", "parallel residual", "packed projections"),
    ),
    "falcon": Family(lambda: tf.FalconConfig(**FALCON), ("grouped queries", "packed projections", "parallel residual")),
    "falcon (new decoder)": Family(
        lambda: tf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
        ("grouped queries", "packed projections", "parallel residual"),
    ),
    "falcon (ALiBi)": Family(
        lambda: tf.FalconConfig(
            **{**FALCON, "hidden_size": 48, "num_attention_heads": 3},
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
        ),
        ("ALiBi", "packed projections", "biases"),
        note="as with transformers' default attention; its eager one adds ALiBi twice",
    ),
    "bloom": Family(
        lambda: tf.BloomConfig(vocab_size=512, hidden_size=48, n_layer=LAYERS, n_head=3, seq_length=CONTEXT),
        ("ALiBi", "packed projections", "biases"),
        note="its config bounds no context: give `--max-length`",
    ),
    "mpt": Family(
        lambda: tf.MptConfig(
            vocab_size=512,
            d_model=48,
            n_layers=LAYERS,
            n_heads=3,
            max_seq_len=CONTEXT,
            attn_config={"clip_qkv": 0.5, "softmax_scale": 0.4},
        ),
        ("ALiBi", "packed projections", "tied embeddings"),
    ),
    "xglm": Family(
        lambda: tf.XGLMConfig(
            vocab_size=512,
            d_model=64,
            ffn_dim=128,
            num_layers=LAYERS,
            attention_heads=4,
            max_position_embeddings=CONTEXT,
        ),
        ("biases", "embedding scale", "tied embeddings"),
    ),
    "gpt_neox_japanese": Family(
        lambda: tf.GPTNeoXJapaneseConfig(**TINY, num_hidden_layers=LAYERS, max_position_embeddings=CONTEXT),
        ("packed projections",),
    ),
    **OTHERS,
}

_FEATURES = {name: family.features for name, family in FAMILIES.items() if not family.refused}
EXPORTED, REFUSED = [*_FEATURES], [name for name in FAMILIES if name not in _FEATURES]
# What `make test` runs: in all forms rows that together have every feature, and on one prompt with one exit others that
# bring two features which no row before has together.
IN_ALL_FORMS = covering(_FEATURES)
BRIEFLY = covering({name: pairs(features) for name, features in _FEATURES.items()}, IN_ALL_FORMS)


def build(name: str) -> SourceModel:
    """The family's model; norms, biases, buffers and all are random, so that an omitted one changes the result."""
    config = FAMILIES[name].config()
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation=reference_attention(config), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "weight" in key else 0.0))
            elif not parameter.any():
                parameter.copy_(torch.randn_like(parameter) * 0.06)
            else:
                parameter.mul_(3.0)  # the default scale leaves attention almost uniform
        for module in model.modules():
            # Trained norms keep scores small that are not scaled; else each layer makes rounding several times larger.
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                module.q_norm.weight.mul_(module.head_dim**-0.5)
        stored = model.state_dict()
        for key, buffer in model.named_buffers():
            computed = key.endswith(("_decay", "slope_rate"))  # lightning attention's, each from the other
            if key in stored and buffer.is_floating_point() and not computed:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return wrap_model(model, name)
