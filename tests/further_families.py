"""Rows of `families` for architectures that repeat what others have: two layers, one of each kind where they differ."""

from copy import deepcopy
from typing import Any

import transformers as tf
from tiny_configs import CONTEXT, EXPERTS, GPT, GROUPED, HEADS, LATENT, SIZES, TINY, VISION, WINDOW, YARN, Family, rope

LAYERS = 2


def shallow(sizes: dict[str, Any]) -> dict[str, Any]:
    return {**sizes, "num_hidden_layers": LAYERS}


PLAIN, SHARED, WIDE = shallow(SIZES), shallow(GROUPED), shallow(HEADS)
MIXED = ["sliding_attention", "full_attention"]
SMALL_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ENCODER = {
    **{**TINY, "intermediate_size": 128, "num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT},
    "is_decoder": True,
    "pad_token_id": 0,
}
TRANSLATION = {
    "vocab_size": 512,
    "d_model": 64,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
}
PARTIAL = rope("default", partial_rotary_factor=0.5)


def row(
    kind: Any,
    sizes: dict[str, Any],
    *features: str,
    refused: str = "",
    note: str = "",
    **values: Any,
) -> Family:
    return Family(lambda: kind(**deepcopy({**sizes, **values})), features, refused, note, LAYERS)


FURTHER: dict[str, Family] = {
    "ministral": row(
        tf.MinistralConfig,
        WIDE,
        "sliding window",
        "per-layer types",
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    # Heads of a width that ONNX Runtime's attention does not rotate.
    "arcee": row(tf.ArceeConfig, {**WIDE, "head_dim": 24}, "yarn rotary scaling", "heads of 24", **YARN),
    "glm4": row(tf.Glm4Config, WIDE, "partial rotary", "interleaved rotary", "biases", **PARTIAL),
    "glm4_moe": row(
        tf.Glm4MoeConfig,
        WIDE,
        *("partial rotary", "q/k norms", "experts", "shared experts", "per-layer types"),
        **SMALL_EXPERTS,
        **PARTIAL,
        n_routed_experts=8,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "olmo": row(tf.OlmoConfig, SHARED, clip_qkv=0.5),
    "olmo3": row(
        tf.Olmo3Config,
        SHARED,
        *("q/k norms", "norms after", "sliding window", "per-layer types"),
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "olmoe": row(tf.OlmoeConfig, SHARED, "experts", "q/k norms", num_experts=8, num_experts_per_tok=2),
    "ernie4_5": row(tf.Ernie4_5Config, WIDE, "interleaved rotary", "biases", use_bias=True),
    "ernie4_5_moe": row(
        tf.Ernie4_5_MoeConfig,
        SHARED,
        *("experts", "shared experts", "per-layer types"),
        moe_intermediate_size=32,
        moe_num_experts=8,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "exaone4": row(
        tf.Exaone4Config,
        WIDE,
        *("q/k norms", "norms after", "sliding window", "per-layer types", "layers without rotary"),
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "nemotron": row(tf.NemotronConfig, WIDE, "partial rotary", **PARTIAL),
    "seed_oss": row(tf.SeedOssConfig, WIDE, "biases"),
    "deepseek_v2": row(
        tf.DeepseekV2Config,
        PLAIN,
        *("latent attention", "experts", "shared experts", "interleaved rotary"),
        **SMALL_EXPERTS,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **LATENT,
        num_key_value_heads=4,
    ),
    "hunyuan_v1_dense": row(tf.HunYuanDenseV1Config, WIDE, "q/k norms"),
    "hunyuan_v1_moe": row(
        tf.HunYuanMoEV1Config, WIDE, "q/k norms", "experts", "shared experts", num_experts=8, moe_topk=2
    ),
    "minimax_m2": row(tf.MiniMaxM2Config, WIDE, "experts", "q/k norms", "partial rotary", **EXPERTS, **PARTIAL),
    "nanochat": row(tf.NanoChatConfig, SHARED, "q/k norms", "softcaps", final_logit_softcapping=3.0),
    "bitnet": row(tf.BitNetConfig, SHARED, note="a full-precision checkpoint"),
    "granitemoe": row(
        tf.GraniteMoeConfig,
        SHARED,
        "experts",
        "logit scaling",
        **EXPERTS,
        logits_scaling=3.0,
        residual_multiplier=0.5,
    ),
    "qwen2_moe": row(
        tf.Qwen2MoeConfig,
        SHARED,
        *("experts", "shared experts", "biases"),
        **SMALL_EXPERTS,
        num_experts=8,
        shared_expert_intermediate_size=32,
    ),
    "qwen2_vl": Family(
        lambda: tf.Qwen2VLConfig(
            text_config={**SHARED, **rope("default", mrope_section=[2, 3, 3])},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        ),
        ("text model inside ForConditionalGeneration", "biases"),
        layers=LAYERS,
    ),
    "qwen3_vl": Family(
        lambda: tf.Qwen3VLConfig(
            text_config={**WIDE, **rope("default", mrope_section=[2, 3, 3], mrope_interleaved=True)},
            vision_config={
                **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
        ),
        ("text model inside ForConditionalGeneration", "q/k norms"),
        layers=LAYERS,
    ),
    "llava": Family(
        lambda: tf.LlavaConfig(
            text_config={"model_type": "llama", **WIDE},
            vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
            image_token_index=3,
        ),
        ("text model inside ForConditionalGeneration",),
        layers=LAYERS,
    ),
    "phi4_multimodal": row(
        tf.Phi4MultimodalConfig,
        SHARED,
        *("partial rotary", "packed projections"),
        **PARTIAL,
        vision_config=VISION,
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    ),
    "vaultgemma": row(
        tf.VaultGemmaConfig,
        WIDE,
        *("softcaps", "sliding window", "per-layer types"),
        sliding_window=WINDOW,
        layer_types=MIXED,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "apertus": row(tf.ApertusConfig, SHARED, "q/k norms", "llama3 rotary scaling"),
    "helium": row(tf.HeliumConfig, WIDE, "interleaved rotary"),
    "persimmon": row(tf.PersimmonConfig, PLAIN, "partial rotary", "q/k norms", "packed projections", **PARTIAL),
    "jetmoe": row(
        tf.JetMoeConfig,
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS},
        *("experts", "mixture of attention heads"),
        **{**EXPERTS, "num_key_value_heads": 2, "kv_channels": 16, "max_position_embeddings": CONTEXT},
    ),
    "biogpt": row(tf.BioGptConfig, PLAIN, "learned positions", "embedding scale", "biases"),
    "gpt_bigcode": row(tf.GPTBigCodeConfig, {**GPT, "n_layer": LAYERS}, "learned positions", "biases"),
    "ctrl": row(tf.CTRLConfig, {**GPT, "n_layer": LAYERS, "dff": 128}, "biased head"),
    "openai-gpt": row(tf.OpenAIGPTConfig, {**GPT, "n_layer": LAYERS}, "learned positions", "norms after"),
    # Encoders that are used as decoders: the norm comes last in each layer, and a transformation before the head.
    "bert": row(tf.BertConfig, ENCODER, "learned positions", "norms after", "no final norm", "biased head"),
    "xlm-roberta": row(
        tf.XLMRobertaConfig,
        ENCODER,
        *("learned positions", "norms after", "no final norm", "biased head"),
        note="positions count on from the padding id; a padding token inside a text counts as one",
    ),
    "electra": row(tf.ElectraConfig, ENCODER, "learned positions", "norms after", "no final norm", embedding_size=32),
    "big_bird": row(tf.BigBirdConfig, ENCODER, "learned positions", "norms after", attention_type="original_full"),
    # Decoders of encoder-decoder models, without their encoder.
    "bart": row(tf.BartConfig, TRANSLATION, "learned positions", "norms after", max_position_embeddings=CONTEXT),
    "pegasus": row(tf.PegasusConfig, TRANSLATION, max_position_embeddings=CONTEXT),
    "whisper": row(
        tf.WhisperConfig,
        {**TRANSLATION, "eos_token_id": 2, "bos_token_id": 1, "decoder_start_token_id": 1},
        "learned positions",
        note="its decoder, without audio",
        max_target_positions=CONTEXT,
    ),
    "hrm_text": Family(
        lambda: tf.HrmTextConfig(**{**PLAIN, "num_hidden_layers": 1}, H_cycles=2, L_cycles=2),
        ("layers that run several times", "gated attention", "embedding scale"),
        note="prompts are causal, as without token_type_ids",
        layers=6,
    ),
}
