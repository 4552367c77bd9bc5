"""Rows of `families` that cannot be exported: they must be refused in a sentence, not go wrong. And what has no row."""

import transformers as tf
from further_families import LAYERS, MIXED, SMALL_EXPERTS, WIDE, row
from tiny_configs import CONTEXT, HEADS, TINY, WINDOW, Family

BLT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    "num_hidden_layers": LAYERS,
}
PATCHES = {**BLT, "vocab_size": 260, "hidden_size_global": 64}

REFUSED_ROWS: dict[str, Family] = {
    "xlnet": row(
        tf.XLNetConfig,
        {"vocab_size": 512, "d_model": 64, "n_layer": LAYERS, "n_head": 4, "d_inner": 128},
        refused="attends to later tokens",
    ),
    "cpmant": row(
        tf.CpmAntConfig,
        {**TINY, "num_hidden_layers": LAYERS, "dim_head": 16, "dim_ff": 128},
        refused="attends to later tokens",
    ),
    "prophetnet": row(
        tf.ProphetNetConfig,
        {
            **{"vocab_size": 512, "hidden_size": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
            **{"num_encoder_layers": 1, "num_encoder_attention_heads": 4, "num_decoder_layers": LAYERS},
            **{"num_decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False},
        },
        add_cross_attention=False,
        refused="something happens outside any module",
    ),
    "reformer": row(
        tf.ReformerConfig,
        TINY,
        is_decoder=True,
        attn_layers=["local", "local"],
        attention_head_size=16,
        feed_forward_size=64,
        axial_pos_embds=False,
        max_position_embeddings=CONTEXT,
        local_attn_chunk_length=16,
        refused="something happens outside any module",
    ),
    "xlm": row(
        tf.XLMConfig,
        {"vocab_size": 512, "emb_dim": 64, "n_layers": LAYERS, "n_heads": 4, "max_position_embeddings": CONTEXT},
        *("learned positions", "norms after"),
        causal=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        refused="has no module for each decoder layer",
    ),
    "inkling2 (text)": row(
        tf.Inkling2TextConfig,
        HEADS,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=WINDOW,
        rel_extent=16,
        d_rel=8,
        unpadded_vocab_size=512,
        refused="reads more than the last layer's hidden states",
    ),
    "blt": row(
        tf.BltConfig,
        {"vocab_size": 260, "patcher_config": PATCHES, "encoder_config": PATCHES, "decoder_config": PATCHES},
        global_config=BLT,
        encoder_hash_byte_group_vocab=64,
        refused="gives no hidden_size: add its layers' width",
    ),
    "deepseek_v4": row(
        tf.DeepseekV4Config,
        {**{key: value for key, value in WIDE.items() if key != "intermediate_size"}, "num_key_value_heads": 1},
        **{**SMALL_EXPERTS, "n_routed_experts": 8, "mlp_layer_types": ["hash_moe", "moe"]},
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        **{"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "q_lora_rank": 24, "o_groups": 2},
        **{"o_lora_rank": 16, "sliding_window": WINDOW, "partial_rotary_factor": 0.5, "hc_mult": 2},
        refused="recurrent state",
    ),
    "gemma4_unified_assistant": row(
        tf.Gemma4UnifiedAssistantConfig,
        {"backbone_hidden_size": 64},
        text_config={
            **{**WIDE, "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": 2 * MIXED},
            **{"num_kv_shared_layers": 2, "global_head_dim": 16},
        },
        refused="cannot run on token ids alone",
    ),
}

# Classes of transformers 5.23 of which there is no tiny model.
UNBUILT = {
    "MusicgenForCausalLM": "AutoModelForCausalLM gives it the config of the model around it, which it does not take",
    "MusicgenMelodyForCausalLM": "as MusicgenForCausalLM",
    "Gemma4AssistantForCausalLM": "its config asks that all layers share keys and values, which its layers refuse",
    "Emu3ForCausalLM": "its weights are of the whole model, whose text model transformers loads by no class",
    "MllamaForCausalLM": "as Emu3ForCausalLM",
    "Dots3NoteForCausalLM": "a tiny config of it asks for more parameters than it has",
    "Gemma3nForConditionalGeneration": "its vision tower needs the package timm; its text model has a row",
}
