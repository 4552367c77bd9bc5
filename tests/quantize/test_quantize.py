"""Which matrices of a model are quantized, and what is left in the model behind it."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build

from tide_export.bundle.manifest import Quantization
from tide_export.model.source import load_model
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.matrices import find_matrices

INT4 = Quantization("rtn", 4, 32, True, 4)
GPTQ = Quantization("gptq", 4, 32, True, 4)


def names_of(source) -> tuple[set[str], set[str], set[str]]:
    found = find_matrices(source)
    inside = {m.name.split(".", 3)[-1] for layer in found.linear for m in layer.values()}
    experts = {m.name.split(".", 3)[-1] for layer in found.experts for m in layer}
    return {m.name for m in found.outside}, inside, experts


def test_every_matrix_of_a_llama_a_tied_one_once() -> None:
    around, inside, experts = names_of(build("llama (3.1)"))
    assert around == {"model.embed_tokens.weight"}
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    assert inside == attention | {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert not experts
    assert names_of(build("llama"))[0] == {"model.embed_tokens.weight", "lm_head.weight"}


def test_experts_are_quantized_and_what_chooses_between_them_is_not() -> None:
    _, inside, experts = names_of(build("qwen3_moe"))
    assert {name.rsplit(".", 1)[0] for name in experts} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert not any("gate.weight" in name for name in inside)
    assert any(name.endswith("mlp.gate.weight") for name in find_matrices(build("qwen3_moe")).unquantized)


def test_a_vision_tower_is_left_alone() -> None:
    around, inside, _ = names_of(build("gemma3"))
    assert inside
    assert not any("vision" in name for name in around | inside)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_model_computes_with_what_the_integers_stand_for(family: str) -> None:
    source = build(family)
    before = {name: parameter.clone() for name, parameter in source.model.named_parameters()}
    weights = source.weights_sha256
    quantize_model(source, INT4)
    assert source.weights_sha256 == weights
    assert source.quantized is not None
    after = dict(source.model.named_parameters())
    for name, blocks in source.quantized.blocks.items():
        stored = after[name].detach().numpy()
        if family == "gpt2" and ".c_" in name:  # Conv1D
            stored = stored.T
        np.testing.assert_array_equal(stored, blocks.values())
        assert not torch.equal(before[name], after[name])
    untouched = before.keys() - source.quantized.blocks.keys()
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    assert any("ln_" in name or "layernorm" in name for name in untouched)


def texts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 500, (48,), generator=generator).tolist() for _ in range(count)]


@pytest.mark.parametrize("budget", [None, 4.8])  # with outlier columns, and a head of 4 bits
def test_gptq_is_nearer_to_the_model_than_rounding_on_text_it_has_not_seen(
    two_layers: Path, demo_text_ids: list[int], budget: float | None
) -> None:
    """On a trained model: random ones have nothing between their inputs that could make up for an error."""
    source = load_model(two_layers)
    sequences = [demo_text_ids[start : start + 96] for start in range(0, 960, 96)]
    ids = torch.tensor(sequences[8:])
    with torch.no_grad():
        wanted = source.model(ids).logits.log_softmax(-1)
        distance = []
        for settings in (INT4, GPTQ):
            made = copy.deepcopy(source)
            quantize_model(made, replace(settings, budget=budget), sequences[:8])
            assert made.quantized is not None
            blocks = made.quantized.blocks
            assert any(matrix.outliers is not None for matrix in blocks.values()) == (budget is not None)
            assert ("lm_head.weight" in blocks) == (budget is not None)
            got = made.model(ids).logits.log_softmax(-1)
            distance.append(float(torch.nn.functional.kl_div(got, wanted, log_target=True, reduction="batchmean")))
    assert distance[1] < 0.9 * distance[0]


def test_gptq_of_matrices_stored_the_other_way_round() -> None:
    source = build("gpt2")
    quantize_model(source, GPTQ, texts(4))
    assert source.quantized is not None
    blocks = source.quantized.blocks["transformer.h.1.mlp.c_fc.weight"]
    np.testing.assert_array_equal(source.model.transformer.h[1].mlp.c_fc.weight.detach().numpy().T, blocks.values())


def test_gptq_with_zero_points_gives_the_grid_it_rounded_to() -> None:
    source = build("llama")
    quantize_model(source, Quantization("gptq", 4, 16, False, 4), texts(4))
    assert source.quantized is not None
    blocks = source.quantized.blocks["model.layers.1.mlp.down_proj.weight"]
    assert blocks.zeros is not None
    stored = source.model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(stored, blocks.values())
    assert len(np.unique(blocks.zeros)) > 2
