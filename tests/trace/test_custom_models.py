"""Models of nobody's library: attention is recognised by what it computes, and positions made inside become position
ids."""

from pathlib import Path

import pytest
import tiers
import torch
from tiny_engines import engine_of, pieces_of
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel, wrap_model
from tide_export.routers.random_routers import random_routers
from tide_export.trace.attention.masks import layer_masks
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full

PROMPTS = [[7], [5, 9], [(i * 37) % 60 + 3 for i in range(12)]]
CHECKPOINTS = (1,)


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    vocab_size: int = 64
    hidden_size: int = 32
    num_hidden_layers: int = 2
    max_position_embeddings: int = 32
    positions: str = "none"
    attention: str = "spelled out"


class Mixer(nn.Module):
    """Causal attention of two heads whose class name does not say so."""

    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config = config
        self.project = nn.Linear(32, 96)
        self.merge = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (part.view(batch, length, 2, 16).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if "rotary" in self.config.positions:
            angles = torch.arange(length).float()[:, None] / 100 ** (torch.arange(8) / 8)
            cos, sin = angles.cos(), angles.sin()
            query, key = (
                torch.cat([part[..., :8] * cos - part[..., 8:] * sin, part[..., 8:] * cos + part[..., :8] * sin], -1)
                for part in (query, key)
            )
        if self.config.attention == "sdpa":
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            scores = (query @ key.transpose(2, 3) / 4).masked_fill(~seen, float("-inf"))
            mixed = scores.softmax(-1) @ value
        return self.merge(mixed.transpose(1, 2).reshape(batch, length, 32))


class Layer(nn.Module):
    def __init__(self, config: ToyConfig):
        super().__init__()
        self.mix, self.norm = Mixer(config), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + self.mix(self.norm(x))]


class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.tokens = nn.Embedding(64, 32)
        self.table = nn.Embedding(32, 32)
        self.register_buffer("numbers", torch.arange(32)[None], persistent=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, input_ids: torch.Tensor) -> BaseModelOutput:
        x, length = self.tokens(input_ids), input_ids.shape[1]
        if "arange" in self.config.positions:
            x = x + self.table(torch.arange(length))
        if "table" in self.config.positions:
            x = x + self.table(self.numbers[:, :length])
        if "sinusoidal" in self.config.positions:
            x = x + torch.sin(torch.arange(length).float()[:, None] / torch.linspace(1, 9, 32))
        if "cumsum" in self.config.positions:
            x = x + self.table(torch.ones_like(input_ids).cumsum(1) - 1)
        for layer in self.layers:
            (x,) = layer(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class ToyForCausalLM(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.model = ToyModel(config)
        self.head = nn.Linear(32, 64, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False, attention_mask=None) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.model(input_ids).last_hidden_state))


def toy(positions: str = "none", attention: str = "spelled out") -> SourceModel:
    torch.manual_seed(0)
    model = ToyForCausalLM(ToyConfig(positions=positions, attention=attention))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return wrap_model(model, "toy")


@pytest.mark.parametrize(
    ("positions", "attention"),
    tiers.exhaustive_beyond(
        2,
        [
            ("arange and rotary", "sdpa"),
            ("table and sinusoidal", "spelled out"),
            ("none", "spelled out"),
            ("arange", "sdpa"),
            ("table", "spelled out"),
            ("rotary", "sdpa"),
            ("sinusoidal", "sdpa"),
        ],
    ),
)
def test_it_is_exported_and_equal(positions: str, attention: str, tmp_path: Path) -> None:
    source = toy(positions, attention)
    assert ToyForCausalLM._can_set_attn_implementation(), "transformers takes it for a model of its interface"
    assert layer_masks(source.model, source.structure.layers) is None
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=0, shortlist=8)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, CHECKPOINTS))
    full = check_full(engine, source, PROMPTS, 8)
    exits = check_exit(engine, source, routers, PROMPTS, 8, dividing_thresholds(source, routers, PROMPTS[2]), 4)
    assert full.holds, full.differences
    assert exits.holds, exits.differences
    options = {"max_new_tokens": 8, "mode": "full", "stop_token_ids": []}
    alone = [engine.generate(prompt, **options).tokens for prompt in PROMPTS]
    assert [output.tokens for output in engine.generate(PROMPTS, **options)] == alone


def test_positions_that_would_start_anew_in_every_step_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^ToyForCausalLM: it counts positions .* \(CumSum\)") as caught:
        pieces_of(toy("cumsum"), CHECKPOINTS)
    assert "\n" not in str(caught.value)
