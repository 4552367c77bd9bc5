"""Rows of `families` for models that read images or sound too: their text model, of two layers."""

from copy import deepcopy
from typing import Any

import transformers as tf
from further_families import LAYERS, MIXED, PARTIAL, PLAIN, SHARED, SMALL_EXPERTS, WIDE
from tiny_configs import VISION, WINDOW, Family

GEMMA = {**WIDE, "sliding_window": WINDOW, "layer_types": MIXED, "global_head_dim": 16}


def row(kind: Any, *features: str, note: str = "", refused: str = "", layers: int = LAYERS, **values: Any) -> Family:
    features = ("text model inside ForConditionalGeneration", *features)
    return Family(lambda: kind(**deepcopy(values)), features, refused, note, layers)


MULTIMODAL: dict[str, Family] = {
    "fuyu": row(
        tf.FuyuConfig,
        *("partial rotary", "q/k norms", "packed projections"),
        text_config={"model_type": "persimmon", **PLAIN, **PARTIAL},
        patch_size=4,
        image_token_id=3,
    ),
    "gemma4": row(
        tf.Gemma4Config,
        *("per-layer embeddings", "q/k norms", "sliding window", "per-layer types"),
        text_config={**GEMMA, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "position_embedding_size": 64},
        },
    ),
    "gemma4_unified": row(tf.Gemma4UnifiedConfig, "q/k norms", "sliding window", "per-layer types", text_config=GEMMA),
    "got_ocr2": row(
        tf.GotOcr2Config,
        "biases",
        text_config={"model_type": "qwen2", **SHARED},
        vision_config={
            **{key: VISION[key] for key in ("hidden_size", "image_size", "patch_size", "num_attention_heads")},
            **{"num_hidden_layers": 1, "mlp_dim": 32, "output_channels": 16, "global_attn_indexes": [0]},
        },
        image_token_index=3,
    ),
    "moss_transcribe_diarize": row(
        tf.MossTranscribeDiarizeConfig,
        "q/k norms",
        text_config={"model_type": "qwen3", **WIDE},
        audio_config={
            **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
            **{"num_mel_bins": 8, "max_source_positions": 20},
        },
        audio_token_id=3,
    ),
    "step3p7": row(
        tf.Step3p7Config,
        *("experts", "shared experts", "gated attention", "heads by layer", "sliding window", "q/k norms"),
        text_config={
            **{**WIDE, "num_sliding_attention_heads": 8, "sliding_window": WINDOW, "layer_types": MIXED},
            **{**SMALL_EXPERTS, "n_routed_experts": 8, "share_expert_dim": 32},
            **{"mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [0.0, 0.5]},
        },
        vision_config={**VISION, "num_hidden_layers": 1},
        image_token_id=3,
    ),
}
