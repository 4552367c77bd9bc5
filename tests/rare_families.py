"""Rows of `families` for the other classes of transformers: two layers, one of each kind where they differ."""

from functools import partial

import transformers as tf
from further_families import ENCODER, MIXED, PARTIAL, PLAIN, SHARED, SMALL_EXPERTS, TRANSLATION, WIDE, row
from tiny_configs import CONTEXT, EXPERTS, LATENT, LLAMA3, VISION, WINDOW, Family, rope

rare = partial(row, costly=True)

SLIDING = {"sliding_window": WINDOW, "layer_types": MIXED}
POSITIONS = {"max_position_embeddings": CONTEXT}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
ROUTED = {**SMALL_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
INDEXED = {"index_topk": 192, "index_head_dim": 16, "index_n_heads": 4}
LATENT_EXPERTS = {**PLAIN, "num_key_value_heads": 4, **LATENT, **ROUTED, **DENSE_FIRST}
BOTH_ROTARY = {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}}

RARE: dict[str, Family] = {
    "afmoe": rare(
        tf.AfmoeConfig,
        WIDE,
        *("experts", "shared experts", "q/k norms", "sliding window", "layers without rotary"),
        **SMALL_EXPERTS,
        **SLIDING,
        num_experts=8,
        num_shared_experts=1,
    ),
    "aria_text": rare(tf.AriaTextConfig, SHARED, "experts", "shared experts", moe_num_experts=4),
    "axk1": rare(tf.AXK1Config, LATENT_EXPERTS, "latent attention", "experts", "shared experts"),
    "axk2": rare(tf.AXK2Config, LATENT_EXPERTS, "indexed attention", "latent attention", "experts", **INDEXED),
    "beam": rare(
        tf.BeamConfig,
        WIDE,
        *("experts", "sliding window", "layers without rotary", "softcaps"),
        **SMALL_EXPERTS,
        **SLIDING,
        **DENSE_FIRST,
        num_experts=8,
        n_group=1,
        topk_group=1,
        rope_parameters={"sliding_attention": DEFAULT, "full_attention": None},
    ),
    "bert-generation": rare(tf.BertGenerationConfig, ENCODER, "learned positions", "norms after"),
    "bigbird_pegasus": rare(
        tf.BigBirdPegasusConfig, TRANSLATION, "learned positions", attention_type="original_full", **POSITIONS
    ),
    "blenderbot": rare(tf.BlenderbotConfig, TRANSLATION, "learned positions", **POSITIONS),
    "blenderbot-small": rare(tf.BlenderbotSmallConfig, TRANSLATION, "learned positions", "norms after", **POSITIONS),
    "camembert": rare(tf.CamembertConfig, ENCODER, "learned positions", "norms after"),
    "cohere2_moe": rare(
        tf.Cohere2MoeConfig,
        WIDE,
        *("experts", "shared experts", "sliding window", "logit scaling", "layers without rotary"),
        **SLIDING,
        **DENSE_FIRST,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
    ),
    "cohere_compass": rare(
        tf.CohereCompassTextConfig, WIDE, "interleaved rotary", "sliding window", **SLIDING, **BOTH_ROTARY
    ),
    "cwm": rare(tf.CwmConfig, WIDE, "llama3 rotary scaling", "sliding window", **SLIDING, **LLAMA3),
    "data2vec-text": rare(tf.Data2VecTextConfig, ENCODER, "learned positions", "norms after"),
    "deepseek_v32": rare(
        tf.DeepseekV32Config,
        LATENT_EXPERTS,
        *("indexed attention", "latent attention", "experts", "shared experts"),
        **INDEXED,
        note="up to index_topk tokens, which attend to all before them",
    ),
    "diffllama": row(tf.DiffLlamaConfig, WIDE, "differential attention"),
    "doge": row(
        tf.DogeConfig,
        WIDE,
        *("scores by token", "q/k norms"),
        note="up to keep_window_size tokens, which attend to all before them; not is_moe, whose experts mix tokens",
        keep_window_size=192,
    ),
    "dots1": rare(tf.Dots1Config, WIDE, "experts", "shared experts", "q/k norms", **ROUTED, first_k_dense_replace=1),
    "ernie": rare(tf.ErnieConfig, ENCODER, "learned positions", "norms after"),
    "exaone_moe": rare(
        tf.ExaoneMoeConfig,
        WIDE,
        *("experts", "shared experts", "q/k norms", "sliding window", "layers without rotary"),
        **SMALL_EXPERTS,
        **SLIDING,
        **DENSE_FIRST,
        num_experts=8,
    ),
    "flex_olmo": rare(
        tf.FlexOlmoConfig, SHARED, "experts", "q/k norms", "norms after", num_experts=4, num_experts_per_tok=2
    ),
    "flint": rare(
        tf.FlintConfig,
        WIDE,
        *("experts", "shared experts", "sliding window"),
        **SMALL_EXPERTS,
        **SLIDING,
        num_experts=8,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0],
    ),
    "gemma4_unified (text)": rare(
        tf.Gemma4UnifiedTextConfig, WIDE, "sliding window", "per-layer types", "q/k norms", **SLIDING
    ),
    "git": row(
        tf.GitConfig,
        {**PLAIN, "vision_config": VISION},
        *("learned positions", "norms after", "no final norm", "biased head"),
        note="its text decoder, without images",
    ),
    "glm": rare(tf.GlmConfig, WIDE, "partial rotary", "interleaved rotary", "biases", **PARTIAL),
    "glm4_moe_lite": rare(tf.Glm4MoeLiteConfig, LATENT_EXPERTS, "latent attention", "experts", "shared experts"),
    "glm_moe_dsa": rare(
        tf.GlmMoeDsaConfig,
        LATENT_EXPERTS,
        *("indexed attention", "latent attention", "experts", "shared experts"),
        **INDEXED,
        indexer_types=["full", "shared"],
    ),
    "granite_swa": rare(
        tf.GraniteSWAConfig,
        SHARED,
        *("sliding window", "logit scaling"),
        **SLIDING,
        layer_rope_theta=[10000.0, 0.0],
        logits_scaling=3.0,
    ),
    "granitemoe_swa": rare(
        tf.GraniteMoeSWAConfig,
        SHARED,
        *("experts", "shared experts", "sliding window"),
        **EXPERTS,
        **SLIDING,
        layer_rope_theta=[10000.0, 1000.0],
        shared_intermediate_size=32,
    ),
    "granitemoeshared": rare(
        tf.GraniteMoeSharedConfig, SHARED, "experts", "shared experts", **EXPERTS, shared_intermediate_size=32
    ),
    "hy_v3": rare(
        tf.HYV3Config,
        WIDE,
        *("experts", "shared experts", "q/k norms"),
        **SMALL_EXPERTS,
        **DENSE_FIRST,
        num_experts=8,
        num_shared_experts=1,
    ),
    "hy_v4": rare(
        tf.HYV4Config,
        LATENT_EXPERTS,
        *("indexed attention", "latent attention", "experts", "several hidden states of a token"),
        **INDEXED,
        indexer_types=["full", "shared"],
        hc_mult=2,
    ),
    "hyperclovax": rare(tf.HyperCLOVAXConfig, WIDE, "norms after", "logit scaling", logits_scaling=3.0),
    "jais2": rare(tf.Jais2Config, WIDE, "biases"),
    "kolibri1": rare(
        tf.Kolibri1Config,
        WIDE,
        *("experts", "shared experts", "sliding window"),
        **SMALL_EXPERTS,
        **SLIDING,
        num_local_experts=8,
        shared_expert_intermediate_size=32,
    ),
    "laguna": rare(
        tf.LagunaConfig,
        WIDE,
        *("experts", "shared experts", "gated attention", "heads by layer", "sliding window"),
        **SMALL_EXPERTS,
        **SLIDING,
        **DENSE_FIRST,
        **BOTH_ROTARY,
        num_experts=8,
        shared_expert_intermediate_size=32,
        num_attention_heads_per_layer=[4, 8],
    ),
    "marian": rare(tf.MarianConfig, TRANSLATION, "norms after", decoder_vocab_size=512, **POSITIONS),
    "mbart": rare(tf.MBartConfig, TRANSLATION, "learned positions", "embedding scale", **POSITIONS),
    "megatron-bert": rare(tf.MegatronBertConfig, ENCODER, "learned positions"),
    "mellum": rare(
        tf.MellumConfig,
        WIDE,
        *("experts", "q/k norms", "sliding window"),
        **SMALL_EXPERTS,
        **SLIDING,
        **BOTH_ROTARY,
        num_local_experts=8,
    ),
    "mimo_v2_flash": rare(
        tf.MiMoV2FlashConfig,
        {**WIDE, "v_head_dim": 8},
        *("experts", "attention sinks", "partial rotary", "sliding window"),
        **{key: value for key, value in ROUTED.items() if key != "n_shared_experts"},
        **SLIDING,
        **DENSE_FIRST,
        rope_parameters={kind: {**DEFAULT, "partial_rotary_factor": 0.5} for kind in ("full_attention", MIXED[0])},
    ),
    "minicpm3": rare(
        tf.MiniCPM3Config,
        {**PLAIN, **LATENT, "num_key_value_heads": 4},
        *("latent attention", "embedding scale", "logit scaling"),
        dim_model_base=32,
    ),
    "minimax_m3 (text)": row(
        tf.MiniMaxM3VLTextConfig,
        WIDE,
        *("indexed attention", "experts", "shared experts", "partial rotary", "q/k norms"),
        **EXPERTS,
        rotary_dim=8,
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=16,
        index_topk_blocks=12,
    ),
    "ministral3": rare(
        tf.Ministral3Config,
        WIDE,
        *("yarn rotary scaling", "query scaling by position"),
        **rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            llama_4_scaling_beta=0.1,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
        ),
    ),
    "modernbert-decoder": rare(
        tf.ModernBertDecoderConfig,
        {**PLAIN, "cls_token_id": 1, "sep_token_id": 2},
        *("sliding window", "biased head"),
        local_attention=2 * WINDOW,
        layer_types=MIXED,
    ),
    "moshi": rare(tf.MoshiConfig, SHARED, "sliding window", sliding_window=WINDOW, ffn_dim=128, num_codebooks=2),
    "mvp": rare(tf.MvpConfig, TRANSLATION, "learned positions", "norms after", **POSITIONS),
    "plbart": rare(tf.PLBartConfig, TRANSLATION, "learned positions", "norms after", **POSITIONS),
    "rembert": rare(tf.RemBertConfig, {**ENCODER, "input_embedding_size": 32, "output_embedding_size": 96}),
    "roberta": rare(tf.RobertaConfig, ENCODER, "learned positions", "norms after"),
    "roberta-prelayernorm": rare(tf.RobertaPreLayerNormConfig, ENCODER, "learned positions"),
    "roc_bert": rare(
        tf.RoCBertConfig,
        ENCODER,
        *("learned positions", "norms after"),
        pronunciation_vocab_size=512,
        shape_vocab_size=512,
        pronunciation_embed_dim=16,
        shape_embed_dim=16,
    ),
    "roformer": rare(tf.RoFormerConfig, {**ENCODER, "embedding_size": 32}, "interleaved rotary", "norms after"),
    "solar_open": rare(tf.SolarOpenConfig, WIDE, "experts", "shared experts", **ROUTED),
    "trocr": rare(tf.TrOCRConfig, TRANSLATION, "learned positions", "norms after", **POSITIONS),
    "xlm-roberta-xl": rare(tf.XLMRobertaXLConfig, ENCODER, "learned positions"),
    "xmod": row(
        tf.XmodConfig,
        ENCODER,
        *("learned positions", "norms after"),
        note="with the adapters of its default_language",
        languages=["en_XX", "de_DE"],
        default_language="de_DE",
    ),
    "youtu": rare(tf.YoutuConfig, {**PLAIN, **LATENT, "num_key_value_heads": 4}, "latent attention"),
}
