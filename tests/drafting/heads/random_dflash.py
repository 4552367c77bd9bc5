"""DFlash heads with random weights in the layouts that are published, and what they draft by z-lab's formula."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_heads import CONTEXT, EPSILON, VOCABULARY, as_tensor
from safetensors.torch import save_file
from torch.nn import functional

WIDTH, MODEL_LAYERS = 128, 7
HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 16, 96  # others than the model's
LAYERS, BLOCK, MASK = 2, 4, 96
COUNTS = (2, 4, 5)  # of the model's layers that have run where its states are read
THETA = 1000.0


@dataclass
class DFlash:
    """The files of a head with random weights."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    @classmethod
    def random(cls) -> "DFlash":
        generator = torch.Generator().manual_seed(13)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        sizes = {"fc": (WIDTH, len(COUNTS) * WIDTH)}
        norms = {"norm": WIDTH, "hidden_norm": WIDTH}
        for layer in range(LAYERS):
            at = f"layers.{layer}"
            sizes |= {
                f"{at}.self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
                f"{at}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
                f"{at}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
                f"{at}.self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
                f"{at}.mlp.gate_proj": (MLP, WIDTH),
                f"{at}.mlp.up_proj": (MLP, WIDTH),
                f"{at}.mlp.down_proj": (WIDTH, MLP),
            }
            norms |= {f"{at}.self_attn.{name}_norm": HEAD_DIM for name in "qk"}
            norms |= {f"{at}.{name}_layernorm": WIDTH for name in ("input", "post_attention")}
        weights = {f"{name}.weight": 1.5 * normal(*size) * size[1] ** -0.5 for name, size in sizes.items()}
        weights |= {f"{name}.weight": 1 + 0.2 * normal(size) for name, size in norms.items()}
        for layer in range(LAYERS):  # what it attends to matters
            weights[f"layers.{layer}.self_attn.q_norm.weight"] *= 2
            weights[f"layers.{layer}.self_attn.o_proj.weight"] *= 3
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [count - 1 for count in COUNTS]},
            "num_target_layers": MODEL_LAYERS,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": LAYERS,
            "layer_types": ["full_attention"] * LAYERS,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "max_position_embeddings": CONTEXT,
            "attention_bias": False,
            "vocab_size": VOCABULARY,
        }
        return cls(config, weights)

    def write(self, folder: Path) -> Path:
        """As z-lab does."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {key: as_tensor(value) for key, value in self.weights.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def write_speculators(self, folder: Path, head: torch.Tensor, tokens: torch.Tensor) -> Path:
        """As the package `speculators` does, with an output head of its own for `tokens`."""
        layer = {key: value for key, value in self.config.items() if key not in ("block_size", "dflash_config")}
        config = {
            "speculators_model_type": "dflash",
            "transformer_layer_config": layer,
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": list(COUNTS),
            "draft_vocab_size": len(tokens),
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
        }
        own = {"lm_head.weight": head, "d2t": tokens - torch.arange(len(tokens))}
        own["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, tokens, True)
        return DFlash(config, self.weights | own).write(folder)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


@torch.no_grad()
def drafted(weights: dict[str, torch.Tensor], fused: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """What the head reads of the masks [B - 1, D].

    Args:
        fused: fc of the model's hidden states of the rows 0 .. n - 1, [n, D].
        block: embeddings of the last token and the masks, which are at n .. n + B - 1, [B, D].
    """
    w = {key.removesuffix(".weight"): value.float() for key, value in weights.items()}
    context, z = rms(fused, w["hidden_norm"]), block
    positions = torch.arange(len(fused) + len(block)).float()
    angles = torch.outer(positions, THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))

    def rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()], -1)

    for layer in range(LAYERS):
        own = {key.removeprefix(f"layers.{layer}."): value for key, value in w.items()}
        n = rms(z, own["input_layernorm"])
        rows = torch.cat([context, n])

        def heads(x: torch.Tensor, name: str, own: dict[str, torch.Tensor] = own) -> torch.Tensor:
            split = (x @ own[f"self_attn.{name}_proj"].T).view(len(x), -1, HEAD_DIM).transpose(0, 1)
            return split if name == "v" else rms(split, own[f"self_attn.{name}_norm"])

        q, k, v = rotated(heads(n, "q"), angles[len(fused) :]), rotated(heads(rows, "k"), angles), heads(rows, "v")
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        attended = ((q @ k.transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
        z = z + attended @ own["self_attn.o_proj"].T
        h = rms(z, own["post_attention_layernorm"])
        z = z + (functional.silu(h @ own["mlp.gate_proj"].T) * (h @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return rms(z[1:], w["norm"])


def fitted(hidden: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    """Rows of a head [V, D] that gives hidden states [n, D] the tokens `wanted`, by least squares."""
    logits = torch.zeros(len(wanted), VOCABULARY)
    logits[range(len(wanted)), wanted] = 1
    square = hidden.T @ hidden
    return torch.linalg.solve(square + 0.01 * square.diagonal().mean() * torch.eye(len(square)), hidden.T @ logits).T
