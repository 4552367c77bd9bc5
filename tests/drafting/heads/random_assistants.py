"""Gemma 4s with random weights, assistants for them in the layout that is published, and what transformers drafts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from safetensors.torch import save_file

WIDTH, HEADS, KV_HEADS, HEAD_DIM, GLOBAL_DIM = 64, 4, 2, 16, 32
OWN_WIDTH, MLP = 96, 48
VOCABULARY, CONTEXT, WINDOW = 96, 128, 8
CENTROIDS, NEAREST = 8, 3
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL]  # the assistant's layers
KV_LAYERS = (2, 2, 1)  # that these read of the model, whose last two have no keys and values of their own
ATTENTION: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "global_head_dim": GLOBAL_DIM,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


IMAGES = {
    f"{name}_token_id": 90 + number for number, name in enumerate(("image", "video", "audio", "boi", "eoi", "boa"))
}


def target(folder: Path, images: bool = False, **changes: Any) -> Path:
    """Writes a Gemma 4, whose tokens are not all alike; `images`: of the class that also reads images."""
    sizes = (
        ATTENTION
        | {
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        }
        | changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if images:
            model: Any = tf.Gemma4ForConditionalGeneration(tf.Gemma4Config(text_config=sizes, **IMAGES))
        else:
            model = tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**sizes))
        model.save_pretrained(folder)
    return folder


@dataclass
class Assistant:
    """The files of an assistant with random weights."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def random(cls, ordered: bool = False, model_type: str = "gemma4_assistant") -> "Assistant":
        generator = torch.Generator().manual_seed(11)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        sizes = {"pre_projection": (OWN_WIDTH, 2 * WIDTH), "post_projection": (WIDTH, OWN_WIDTH)}
        norms = {"model.norm": OWN_WIDTH}
        for layer, kind in enumerate(KINDS):
            at, width = f"model.layers.{layer}", GLOBAL_DIM if kind == FULL else HEAD_DIM
            sizes |= {
                f"{at}.self_attn.q_proj": (HEADS * width, OWN_WIDTH),
                f"{at}.self_attn.o_proj": (OWN_WIDTH, HEADS * width),
                f"{at}.mlp.gate_proj": (MLP, OWN_WIDTH),
                f"{at}.mlp.up_proj": (MLP, OWN_WIDTH),
                f"{at}.mlp.down_proj": (OWN_WIDTH, MLP),
            }
            norms[f"{at}.self_attn.q_norm"] = width
            names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            norms |= {f"{at}.{name}_layernorm": OWN_WIDTH for name in names}
        weights = {f"{name}.weight": 1.5 * normal(*size) * size[1] ** -0.5 for name, size in sizes.items()}
        weights |= {f"{name}.weight": 1 + 0.2 * normal(size) for name, size in norms.items()}
        for layer in range(len(KINDS)):  # what it attends to matters
            weights[f"model.layers.{layer}.self_attn.q_norm.weight"] *= 2
            weights[f"model.layers.{layer}.post_attention_layernorm.weight"] *= 3
        weights |= {f"model.layers.{layer}.layer_scalar": 1 + 0.1 * normal(1) for layer in range(len(KINDS))}
        weights["model.embed_tokens.weight"] = normal(VOCABULARY, OWN_WIDTH)
        if ordered:
            weights["masked_embedding.centroids.weight"] = normal(CENTROIDS, OWN_WIDTH)
            weights["masked_embedding.token_ordering"] = torch.randperm(VOCABULARY, generator=generator)
        prefix = model_type.removesuffix("_assistant")
        text = {
            **ATTENTION,
            "model_type": f"{prefix}_text",
            "hidden_size": OWN_WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": len(KINDS),
            "num_kv_shared_layers": len(KINDS),
            "layer_types": KINDS,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
        config = {
            "model_type": model_type,
            "backbone_hidden_size": WIDTH,
            "use_ordered_embeddings": ordered,
            "num_centroids": CENTROIDS,
            "centroid_intermediate_top_k": NEAREST,
            "text_config": text,
        }
        return cls(config, weights)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
        return folder


@contextmanager
def all_layers_read(folder: Path) -> Iterator[None]:
    """While open, transformers 5.23 makes the assistant in `folder`, whose layers all read others' keys and values."""
    kind = type(tf.AutoConfig.from_pretrained(folder).text_config)
    modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    with patch.object(kind, "kv_sharing_modes", modes):
        yield


@torch.no_grad()
def before_draft(model: Any, ids: list[int]) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The final hidden state [1, 1, D] of the last but one token, and keys and values of all but the last one."""
    given = torch.tensor([ids[:-1]])
    outputs = model(given, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    return outputs.hidden_states[-1][:, -1:], dict(outputs.shared_kv_states)


@torch.no_grad()
def drafted(
    model: Any, assistant: Any, ids: list[int], following: list[int], unseen: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and next states [n, D] of drafts after `ids`, as `SinglePositionMultiTokenCandidateGenerator` makes
    them; `following` takes the place of the drafts so far, one fewer than drafts.

    unseen: how many of the last keys and values are left out, which should be seen."""
    state, shared = before_draft(model, ids)
    shared = {kind: tuple(each[:, :, : each.shape[2] - unseen] for each in pair) for kind, pair in shared.items()}
    logits, states = [], []
    for token in [ids[-1], *following]:
        embedding = model.get_input_embeddings()(torch.tensor([[token]]))
        outputs = assistant(
            inputs_embeds=torch.cat([embedding, state], -1),
            attention_mask=None,
            position_ids=torch.tensor([[len(ids) - 1 - unseen]]),
            shared_kv_states=shared,
            use_cache=False,
        )
        state = outputs.last_hidden_state
        logits.append(outputs.logits[0, 0])
        states.append(state[0, 0])
    return torch.stack(logits), torch.stack(states)
