"""Targets with random weights, and draft heads for them in the layouts that are published."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_configs import LLAMA3
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 4, 2, 16, 96
VOCABULARY, DEPTH, CONTEXT = 97, 7, 96
EPSILON = 1e-5
LAYERS = (2, 3, 4)  # 2, N // 2, N - 3


def target(folder: Path, **changes: Any) -> Path:
    """Writes a Llama with random weights, whose tokens are not all alike."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Eagle3:
    """The files of a head with random weights; `weights` have the names of EAGLE's layout."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor = field(default_factory=lambda: torch.arange(VOCABULARY))  # by draft id

    @classmethod
    def random(cls, vocabulary: int | None = 40, query_norms: bool = False, bias: bool = False) -> "Eagle3":
        generator = torch.Generator().manual_seed(11)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        sizes = {
            "fc": (WIDTH, 3 * WIDTH),
            "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * WIDTH),
            "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
            "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
            "midlayer.self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "midlayer.mlp.gate_proj": (MLP, WIDTH),
            "midlayer.mlp.up_proj": (MLP, WIDTH),
            "midlayer.mlp.down_proj": (WIDTH, MLP),
            "lm_head": (vocabulary or VOCABULARY, WIDTH),
        }
        weights = {f"{name}.weight": 1.5 * normal(*size) * size[1] ** -0.5 for name, size in sizes.items()}
        norms = ["norm", *(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))]
        weights |= {f"{name}.weight": 1 + 0.2 * normal(WIDTH) for name in norms}
        if query_norms:
            weights |= {f"midlayer.self_attn.{n}_norm.weight": 1 + 0.2 * normal(HEAD_DIM) for n in "qk"}
        if bias:
            weights |= {
                f"midlayer.self_attn.{n}_proj.bias": 0.2 * normal(len(weights[f"midlayer.self_attn.{n}_proj.weight"]))
                for n in "qkvo"
            }
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
        }
        if bias:
            config["attention_bias"] = True
        head = cls(config, weights)
        if vocabulary is not None:
            head.tokens = torch.randperm(VOCABULARY, generator=generator)[:vocabulary]
            config["draft_vocab_size"] = vocabulary
            weights["d2t"] = head.tokens - torch.arange(vocabulary)
            weights["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, head.tokens, True)
        return head

    def write(self, folder: Path) -> Path:
        """In the layout of EAGLE, SpecForge, AngelSlim and NVIDIA."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors")
        return folder

    def write_bin(self, folder: Path) -> Path:
        """The same with pytorch_model.bin, as the first heads of EAGLE's authors."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        torch.save(self.weights, folder / "pytorch_model.bin")
        return folder

    def write_speculators(self, folder: Path, **changes: Any) -> Path:
        """In the layout of the package `speculators`."""
        folder.mkdir()
        top = {"draft_vocab_size", "architectures"}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.config.get("draft_vocab_size"),
            "norm_before_residual": True,
            "transformer_layer_config": {key: value for key, value in self.config.items() if key not in top},
        }
        (folder / "config.json").write_text(json.dumps(config | changes))
        named = {key.replace("midlayer.", "layers.0."): value for key, value in self.weights.items()}
        save_file(named, folder / "model.safetensors")
        return folder


ROPE = LLAMA3["rope_parameters"]
