"""A budget of bits: what is chosen fits it and lowers the divergence, and bundles of the mixture compute it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build
from tiny_engines import engine_of, pieces_of

from tide_export.bundle.manifest import Quantization
from tide_export.model.source import SourceModel, load_model
from tide_export.quantize.budget import measure
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.matrices import find_matrices
from tide_export.routers.random_routers import random_routers
from tide_export.verify.parity import TOLERANCES, check_full
from tide_export.verify.quantized import float32_engine, restore

INT4 = Quantization("rtn", 4, 32, True, 4)
PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]


def read_bits(source: SourceModel) -> float:
    """Bits a weight of layers and head, with scales of 16 bits."""
    assert source.quantized is not None
    blocks = dict(source.quantized.blocks)
    if "lm_head.weight" in blocks:
        del blocks["model.embed_tokens.weight"]
    size = sum(8 * matrix.packed.nbytes + 16 * matrix.scales.size for matrix in blocks.values())
    return size / sum(matrix.values().size for matrix in blocks.values())


def divergence(model: SourceModel, wanted: torch.Tensor, ids: torch.Tensor) -> float:
    got = model.run(ids, []).logits.log_softmax(-1)
    return float(torch.nn.functional.kl_div(got, wanted, log_target=True, reduction="batchmean"))


def test_the_divergence_falls_with_the_budget_which_holds(demo_model: Path, demo_text_ids: list[int]) -> None:
    ids = torch.tensor(demo_text_ids[:960]).reshape(4, 240)
    wanted = load_model(demo_model).run(ids, []).logits.log_softmax(-1)
    found = []
    for budget in (None, 6.0, 7.0):
        source = load_model(demo_model)
        quantize_model(source, replace(INT4, budget=budget))
        assert budget is None or budget - 0.1 < read_bits(source) <= budget
        found.append(divergence(source, wanted, ids))
    assert found[1] < 0.5 * found[0], found
    assert found[2] < 0.5 * found[1], found


def test_matrices_of_the_same_inputs_get_the_same_and_all_that_fits_is_used(two_layers: Path) -> None:
    source = load_model(two_layers)
    quantize_model(source, replace(INT4, budget=5.5))
    assert source.quantized is not None
    kinds = {name: (matrix.bits, matrix.outliers is None) for name, matrix in source.quantized.blocks.items()}
    assert {bits for bits, _ in kinds.values()} == {4, 8}
    assert 5.4 < read_bits(source) <= 5.5
    for layer in (0, 1):
        for same in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({kinds[f"model.layers.{layer}.{name}.weight"] for name in same}) == 1
    assert "lm_head.weight" in kinds, "4 bits are enough for a head that would take more than the budget"
    whole = load_model(two_layers)
    quantize_model(whole, replace(INT4, budget=8.0))
    assert whole.quantized is not None
    assert Counter(matrix.bits for matrix in whole.quantized.blocks.values())[8] > 8
    assert "lm_head.weight" not in whole.quantized.blocks, "in 8 bits it is the embedding"


def test_a_bundle_of_the_mixture_computes_it(two_layers: Path, tmp_path: Path) -> None:
    source = load_model(two_layers)
    quantize_model(source, replace(INT4, budget=6.5))
    routers = random_routers(source, (1,), PROMPTS[2], bottleneck=16, lens_rank=8)
    deployed = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, (1,)))
    full = check_full(float32_engine(deployed.bundle, 1), source, PROMPTS, 16)
    assert full.holds, full.differences
    assert full.within_tolerance == 0
    rounded = check_full(deployed, source, PROMPTS, 16, tolerance=TOLERANCES["int8 matmuls"])
    assert rounded.holds, (rounded.max_error, rounded.largest_logit, rounded.differences)
    again = load_model(two_layers)
    assert 0.0 < (restore(again, deployed.bundle) or 0.0) < 0.2
    assert source.quantized is not None
    stored = again.model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(stored, source.quantized.blocks["model.layers.1.mlp.down_proj.weight"].values())


def test_experts_keep_four_bits() -> None:
    source = build("qwen3_moe")
    quantize_model(source, replace(INT4, budget=6.0))
    assert source.quantized is not None
    assert {matrix.bits for name, matrix in source.quantized.blocks.items() if ".experts." in name} == {4}


def test_where_no_gradient_reaches_a_matrix_its_outputs_count_as_others_do(
    two_layers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = load_model(two_layers)
    linear = list(find_matrices(source).linear[1])
    hook = source.structure.layers[1].register_forward_hook(
        lambda _module, _args, output: output.detach() if torch.is_tensor(output) else (output[0].detach(), *output[1:])
    )
    with caplog.at_level("INFO", "tide_export"):
        inputs, gradients = measure(source, linear)
    hook.remove()
    assert "no gradient reaches model.layers.1" in caplog.text
    assert [len(gradients[module]) for module in linear] == [module.weight.shape[0] for module in linear]
    assert all((gradient == gradient[0]).all() and gradient[0] > 0 for gradient in gradients.values())
    again, reached = measure(source, linear)
    assert all(np.array_equal(again[module], inputs[module]) for module in linear)
    assert not any((gradient == gradient[0]).all() for gradient in reached.values())


@pytest.mark.parametrize("family", ["ctrl", "pegasus", "deepseek_v32"])  # scaled in place; positions by a shape; top-k
def test_embeddings_and_indexers_of_their_own_kind_are_measured(family: str) -> None:
    source = build(family)
    quantize_model(source, replace(INT4, budget=6.0))
    assert source.quantized is not None
    assert {matrix.bits for matrix in source.quantized.blocks.values()} == {4, 8}
