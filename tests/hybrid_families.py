"""Rows of `families` for models with recurrent states: three layers, of which one attends where the family has any."""

from copy import deepcopy
from typing import Any

import transformers as tf
from tiny_configs import GROUPED, HEADS, LATENT, SIZES, TINY, WINDOW, Family

LAYERS = 3
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 8},
}
MAMBA = {**TINY, "num_hidden_layers": LAYERS, "pad_token_id": 0}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN4 = {
    **{**DELTA, **SPARSE, "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 16},
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 128, "indexer_compress_ratio": 4},
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
}
KIMI = {
    **{**SIZES, **LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 32, "num_experts": 4},
    **{"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def row(kind: Any, sizes: dict[str, Any], *features: str, **values: Any) -> Family:
    features = ("recurrent states", *features)
    return Family(lambda: kind(**deepcopy({**sizes, **values})), features, layers=LAYERS)


HYBRID: dict[str, Family] = {
    "lfm2": row(tf.Lfm2Config, GROUPED, "convolutions", layer_types=["conv", "full_attention", "conv"]),
    "qwen3_5 (text)": row(tf.Qwen3_5TextConfig, HEADS, "gated delta rule", **DELTA),
    "qwen3_next": row(
        tf.Qwen3NextConfig, HEADS, "gated delta rule", "experts", **DELTA, **SPARSE, shared_expert_intermediate_size=32
    ),
    "olmo_hybrid": row(tf.OlmoHybridConfig, GROUPED, "gated delta rule", **DELTA),
    "bamba": row(tf.BambaConfig, GROUPED, "mamba 2", **MAMBA2, attn_layer_indices=[1]),
    "granitemoehybrid": row(
        tf.GraniteMoeHybridConfig,
        GROUPED,
        "mamba 2",
        "experts",
        **MAMBA2,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
        layer_types=["mamba", "attention", "mamba"],
    ),
    "falcon_h1": row(tf.FalconH1Config, HEADS, "mamba 2 beside attention", **MAMBA2, mamba_d_ssm=128),
    "nemotron_h": row(
        tf.NemotronHConfig,
        HEADS,
        "mamba 2",
        "layers that keep nothing",
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 8},
        layers_block_type=["mamba", "attention", "mlp"],
    ),
    "zamba2": row(
        tf.Zamba2Config,
        GROUPED,
        "mamba 2",
        "shared blocks",
        **{"mamba_d_state": 24, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 8},
        **{"num_mem_blocks": 1, "hybrid_layer_ids": [1], "attention_head_dim": 32},
        layers_block_type=["mamba", "hybrid", "mamba"],
    ),
    "jamba": row(
        tf.JambaConfig,
        GROUPED,
        "mamba",
        "experts",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "mamba2": row(tf.Mamba2Config, MAMBA, "mamba 2", state_size=24, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    "mamba": row(tf.MambaConfig, MAMBA, "mamba", state_size=8),
    "falcon_mamba": row(tf.FalconMambaConfig, MAMBA, "mamba", state_size=8),
    "lfm2_moe": row(
        tf.Lfm2MoeConfig,
        GROUPED,
        "convolutions",
        "experts",
        **SPARSE,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "lfm3": row(
        tf.Lfm3Config,
        HEADS,
        "convolutions",
        "sliding window",
        sliding_window=WINDOW,
        layer_types=["conv", "full_attention", "sliding_attention"],
    ),
    "qwen3_5_moe (text)": row(
        tf.Qwen3_5MoeTextConfig,
        HEADS,
        "gated delta rule",
        "experts",
        **DELTA,
        **SPARSE,
        shared_expert_intermediate_size=32,
    ),
    "kimi_linear": row(tf.KimiLinearConfig, KIMI, "Kimi's delta attention", "latent attention", "experts"),
    "bailing_hybrid": row(
        tf.BailingHybridConfig,
        KIMI,
        "Kimi's delta attention",
        "latent attention",
        "experts",
        first_k_dense_replace=1,
        num_expert_group=1,
        topk_group=1,
    ),
    "minimax": row(
        tf.MiniMaxConfig,
        HEADS,
        "lightning attention",
        "experts",
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "recurrent_gemma": row(
        tf.RecurrentGemmaConfig,
        {**GROUPED, "num_key_value_heads": 2},
        "gated linear recurrent units",
        "sliding window",
        lru_width=64,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention", "recurrent"],
    ),
    "zamba": row(
        tf.ZambaConfig,
        GROUPED,
        "mamba",
        "shared blocks",
        mamba_d_state=8,
        mamba_dt_rank=8,
        n_mamba_heads=2,
        use_mamba_kernels=False,
        attention_hidden_size=128,
        attention_head_dim=32,
        layers_block_type=["hybrid", "mamba", "hybrid"],
    ),
    "inkling (text)": row(
        tf.InklingTextConfig,
        HEADS,
        "convolutions",
        "biases by distance",
        "experts",
        "sliding window",
        "query scaling by position",
        **{"swa_num_attention_heads": 8, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
        **{"sliding_window_size": WINDOW, "rel_extent": 16, "d_rel": 8, "log_scaling_n_floor": 16},
        **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "zaya": row(
        tf.ZayaConfig,
        HEADS,
        "compressed convolutional attention",
        "experts",
        "partial rotary",
        num_experts=4,
        moe_intermediate_size=32,
        router_hidden_size=16,
        attention_bias=True,
        layer_types=["hybrid", "hybrid", "hybrid"],
        rope_parameters={"hybrid": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "rwkv": row(tf.RwkvConfig, MAMBA, "averages by channel", "shifts by a token", rescale_every=1),
    "xlstm": row(tf.xLSTMConfig, MAMBA, "matrix memory", "softcaps", num_heads=4),
    "qwen4_exp (text)": row(
        tf.Qwen4ExpTextConfig,
        HEADS,
        "gated delta rule",
        "indexed attention",
        "several hidden states of a token",
        "experts",
        **QWEN4,
    ),
    "qwen4_exp (n-grams)": row(
        tf.Qwen4ExpTextConfig,
        HEADS,
        "gated delta rule",
        "indexed attention",
        "several hidden states of a token",
        "embeddings of n-grams",
        "experts",
        **QWEN4,
        **{"ple_layer_ids": [1, 3], "ngram_vocab_size_base": 64, "ple_embed_dim": 32},
    ),
}
