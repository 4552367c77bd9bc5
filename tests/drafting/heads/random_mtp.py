"""Models with random weights whose checkpoints hold an MTP layer as Qwen3-Next and Qwen3.5 are published, and what that
layer computes, from the layout's definition."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tide_export.model.source import SourceModel

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 4, 2, 32, 96
VOCABULARY, DEPTH, CONTEXT = 96, 4, 96
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_MLP = 4, 2, 32
ROTATED = HEAD_DIM // 4  # numbers of a head that are rotated: partial_rotary_factor .25
THETA, EPSILON = 10000.0, 1e-6

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
SPARSE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": EXPERT_MLP,
    "shared_expert_intermediate_size": EXPERT_MLP,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH}


@dataclass(frozen=True)
class Family:
    """A model's config, and whether its MTP layer has experts and stores these in one tensor."""

    config: Any
    sparse: bool = False
    stacked: bool = False


FAMILIES = {
    "qwen3_5": Family(lambda: tf.Qwen3_5TextConfig(**SIZES)),
    "qwen3_5 with images": Family(lambda: tf.Qwen3_5Config(text_config=SIZES, vision_config=VISION)),
    "qwen3_5_moe": Family(lambda: tf.Qwen3_5MoeTextConfig(**SIZES, **SPARSE), sparse=True, stacked=True),
    "qwen3_next": Family(lambda: tf.Qwen3NextConfig(**SIZES, **SPARSE), sparse=True),
}


def mtp_tensors(sparse: bool = False, stacked: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of the layer by their published names: 15 of one without experts."""
    generator = torch.Generator().manual_seed(13)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    sizes = {
        "fc": (WIDTH, 2 * WIDTH),
        "layers.0.self_attn.q_proj": (2 * HEADS * HEAD_DIM, WIDTH),  # a head's queries, then its gate
        "layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "layers.0.self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    }
    mlps = {"layers.0.mlp": MLP}
    if sparse:
        sizes |= {"layers.0.mlp.gate": (EXPERTS, WIDTH), "layers.0.mlp.shared_expert_gate": (1, WIDTH)}
        mlps = {"layers.0.mlp.shared_expert": EXPERT_MLP}
        mlps |= {f"layers.0.mlp.experts.{expert}": EXPERT_MLP for expert in range(EXPERTS)}
    for name, size in mlps.items():
        sizes |= {f"{name}.{part}_proj": (size, WIDTH) for part in ("gate", "up")} | {
            f"{name}.down_proj": (WIDTH, size)
        }
    tensors = {f"mtp.{name}.weight": 1.5 * normal(*size) * size[1] ** -0.5 for name, size in sizes.items()}
    norms = {"pre_fc_norm_embedding": WIDTH, "pre_fc_norm_hidden": WIDTH, "norm": WIDTH}
    norms |= {"layers.0.input_layernorm": WIDTH, "layers.0.post_attention_layernorm": WIDTH}
    norms |= {"layers.0.self_attn.q_norm": HEAD_DIM, "layers.0.self_attn.k_norm": HEAD_DIM}
    tensors |= {f"mtp.{name}.weight": 0.3 * normal(size) for name, size in norms.items()}  # less 1
    if stacked:
        experts = [
            {
                part: tensors.pop(f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight")
                for part in ("gate", "up", "down")
            }
            for expert in range(EXPERTS)
        ]
        joined = [torch.cat([expert["gate"], expert["up"]]) for expert in experts]
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.stack(joined)
        tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack([expert["down"] for expert in experts])
    return tensors


def write_model(folder: Path, name: str, **changes: torch.Tensor | None) -> Path:
    """Writes a model of family `name`; `changes` replace tensors of its MTP layer, or take them out."""
    family = FAMILIES[name]
    config = family.config()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        kind = tf.AutoModelForImageTextToText if hasattr(config, "vision_config") else tf.AutoModelForCausalLM
        kind.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | mtp_tensors(family.sparse, family.stacked) | changes
    kept = {key: value for key, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def published(
    name: str, source: SourceModel, x: torch.Tensor, s: torch.Tensor, tensors: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V] and next states [S, D], of embeddings x and normalized states s of the positions 0 .. S - 1.

    `tensors` take the place of `mtp_tensors`."""
    family = FAMILIES[name]
    tensors = mtp_tensors(family.sparse) if tensors is None else tensors
    w = {key.removeprefix("mtp.").removesuffix(".weight"): value for key, value in tensors.items()}
    parts = [rms(x, w["pre_fc_norm_embedding"]), rms(s, w["pre_fc_norm_hidden"])]
    z = torch.cat(parts, -1) @ w["fc"].T
    layer = {key.removeprefix("layers.0."): value for key, value in w.items()}
    z = z + attention(layer, rms(z, layer["input_layernorm"]))
    h = rms(z, layer["post_attention_layernorm"])
    z = z + (experts(layer, h) if family.sparse else mlp(layer, "mlp", h))
    state = rms(z, w["norm"])
    return source.head(state[None])[0], state


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * (1 + weight)


def attention(w: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    count = len(h)
    q, gate = (h @ w["self_attn.q_proj"].T).view(count, HEADS, 2 * HEAD_DIM).split(HEAD_DIM, -1)
    k, v = ((h @ w[f"self_attn.{name}_proj"].T).view(count, KV_HEADS, HEAD_DIM) for name in "kv")
    angles = torch.outer(torch.arange(count).float(), THETA ** -(torch.arange(0, ROTATED, 2) / ROTATED))[:, None]

    def rotated(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        heads = rms(heads, norm)
        a, b = heads[..., :ROTATED].chunk(2, -1)
        turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        return torch.cat([*turned, heads[..., ROTATED:]], -1).transpose(0, 1)

    q, k, v = rotated(q, w["self_attn.q_norm"]), rotated(k, w["self_attn.k_norm"]), v.transpose(0, 1)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
    scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(torch.ones(count, count).triu(1) > 0, -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1) * gate.sigmoid()
    return attended.flatten(1) @ w["self_attn.o_proj"].T


def mlp(w: dict[str, torch.Tensor], name: str, h: torch.Tensor) -> torch.Tensor:
    gated = functional.silu(h @ w[f"{name}.gate_proj"].T) * (h @ w[f"{name}.up_proj"].T)
    return gated @ w[f"{name}.down_proj"].T


def experts(w: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    """The experts with the largest probabilities, which sum to 1, and the shared expert times its gate."""
    shares, chosen = (h @ w["mlp.gate"].T).softmax(-1).topk(EXPERTS_PER_TOKEN)
    shares = torch.zeros(len(h), EXPERTS).scatter(1, chosen, shares / shares.sum(-1, keepdim=True))
    routed = sum(shares[:, [expert]] * mlp(w, f"mlp.experts.{expert}", h) for expert in range(EXPERTS))
    return routed + (h @ w["mlp.shared_expert_gate"].T).sigmoid() * mlp(w, "mlp.shared_expert", h)
