"""Sizes and parts of the tiny configs in `families` and `further_families`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as tf

LAYERS = 3
CHECKPOINTS = (1, 2)
CONTEXT = 256
WINDOW = 8  # shorter than the test sequences, so that a lost window shows
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": CONTEXT,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
GPT = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {**TINY, "num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12}
TWO_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,  # as many as the text model has: the deeper list is no guide
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def small_llama(vocab_size: int, width: int, layers: int, context: int) -> tf.LlamaConfig:
    """A Llama of two heads, for tests of files and processes."""
    return tf.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=context,
    )


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=CONTEXT // 4
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + 0.1 * n for n in range(8)],
    long_factor=[2.0 + 0.5 * n for n in range(8)],
    factor=4.0,
    original_max_position_embeddings=CONTEXT // 2,
)
SCALED_LONGROPE = {"rope_parameters": LONGROPE["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.3}}


@dataclass(frozen=True)
class Family:
    """One row of docs/reference/models.md.

    Attributes:
        config: of a tiny model.
        features: what the row has beyond causal attention and a norm, in words; tests select rows by these.
        refused: part of the sentence with which `trace` refuses the model; empty where it is exported.
        note: a sentence for the last column.
        layers: of the tiny model; there is a checkpoint after each but the last.
    """

    config: Callable[[], tf.PreTrainedConfig]
    features: tuple[str, ...] = ()
    refused: str = ""
    note: str = ""
    layers: int = LAYERS

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(range(1, self.layers))
