"""Outlier columns of int4 matrices: which they are, which matrices have some, and that bundles, drafters and the
reference know them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiers
import torch
import transformers as tf
from tiny_engines import engine_of, pieces_of

from tide_export.bundle.manifest import Quantization
from tide_export.drafting.target import Target
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.model.source import SourceModel, wrap_model
from tide_export.names.operators import INTEGER_MATMULS, OP_GATED_MATMUL
from tide_export.quantize.budget import choose_formats
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.outliers import outlier_count
from tide_export.quantize.rounding import round_for_tensorrt, round_to_nearest
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.config import GenerationConfig
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import TOLERANCES, check_exit, check_full
from tide_export.verify.quantized import float32_engine, restore

WIDTH, LAYERS, CHECKPOINTS = 256, 2, (1,)
INT4 = Quantization("rtn", 4, 32, True, 4, 5.0)
WIDE = {
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda **other: tf.LlamaConfig(
        **{**WIDE, "intermediate_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True, **other}
    ),
    "gpt2": lambda **other: tf.GPT2Config(**{**WIDE, **other}),  # its matrices are stored the other way round
    "phi": lambda **other: tf.PhiConfig(**{**WIDE, "intermediate_size": 512, **other}),  # its head has a bias
}
FURTHER = {
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(
        **{**WIDE, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 64},
        linear_value_head_dim=64,
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(  # its experts have no outliers
        **{**WIDE, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64},
        **{"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
}
PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
LARGE = [3, 77, 130, 201]  # normalized states that are much larger than the others


def wide(kind: str = "llama", large: float = 8.0, **other) -> SourceModel:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config({**CONFIGS, **FURTHER}[kind](**other), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter[[index for index in LARGE if index < len(parameter)]] = large
            else:
                parameter.mul_(1.0 if kind == "qwen3_5" else 2.0)  # states that recur carry rounding on, and amplify it
    return wrap_model(model, kind)


def logits(source: SourceModel) -> torch.Tensor:
    return source.run(torch.tensor([PROMPTS[2]]), []).logits[0]


def test_outliers_fill_whole_blocks() -> None:
    assert outlier_count(576, INT4, 32) == 32
    assert outlier_count(576, INT4, 8) == 64
    assert outlier_count(1536, INT4, 16) == 96


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_columns_that_add_most_are_found(kind: str) -> None:
    source = wide(kind)
    found = choose_formats(source, INT4, round_to_nearest)
    names = {id(parameter): name for name, parameter in source.model.named_parameters()}
    formats = {names[parameter]: format_ for parameter, format_ in found.items()}
    assert len(formats) == {"llama": 7, "gpt2": 4, "phi": 6}[kind] * LAYERS + 1
    outliers = {name: set(f.outliers) for name, f in formats.items() if f.outliers is not None}
    assert len(outliers) > LAYERS
    for name, columns in outliers.items():
        assert len(columns) in (32, 64, 128)
        if any(part in name for part in ("lm_head", "q_proj", "up_proj", "c_attn", "c_fc", "fc1")):  # after a norm
            assert set(LARGE) <= columns, name
    if kind == "llama":
        layer = "model.layers.0."
        for same in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            alike = [formats[f"{layer}{name}.weight"] for name in same]
            assert len({(f.bits, None if f.outliers is None else f.outliers.tobytes()) for f in alike}) == 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_int4_with_outliers_errs_far_less_and_the_embedding_stays(kind: str) -> None:
    source, plain = wide(kind, 30.0), wide(kind, 30.0)
    before = logits(source)
    quantize_model(source, INT4, widest=4)
    quantize_model(plain, replace(INT4, budget=None))
    assert source.quantized is not None
    assert plain.quantized is not None
    assert source.quantized.blocks["lm_head.weight"].bits == 4
    embedding = source.model.get_input_embeddings().weight
    assert torch.equal(embedding, plain.model.get_input_embeddings().weight)
    assert Counter(matrix.bits for matrix in source.quantized.blocks.values())[8] == 1
    assert not any(matrix.outliers is not None for matrix in plain.quantized.blocks.values())
    error, plain_error = (logits(source) - before).std(), (logits(plain) - before).std()
    assert error < 0.7 * plain_error, (error, plain_error)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (lambda: wide(hidden_size=128, intermediate_size=128), {}),
        (wide, {"settings": Quantization("rtn", 8, 32, True, 4)}),
        (wide, {"settings": Quantization("rtn", 4, 32, False, 4)}),
        (wide, {"settings": Quantization("rtn", 4, 32, True, 1, 5.0)}),
        (wide, {"settings": Quantization("rtn", 4, 256, True, 4, 5.0)}),
        (wide, {"rounding": round_for_tensorrt(np.dtype(np.float16)), "outside": False}),
    ],
    ids=["narrow", "int8", "zero points", "float32 inputs", "large blocks", "TensorRT"],
)
def test_other_matrices_have_none(source, options) -> None:
    model = source()
    quantize_model(model, **{"settings": INT4, **options})
    assert model.quantized is not None
    assert all(matrix.outliers is None for matrix in model.quantized.blocks.values())


@pytest.mark.parametrize("kind", tiers.exhaustive_but(["llama", "gpt2"], [*CONFIGS, *FURTHER]))
def test_bundle_reference_and_drafter_know_them(kind: str, tmp_path: Path) -> None:
    source = wide(kind)
    quantize_model(source, replace(INT4, budget=5.5))
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=8)
    deployed = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, CHECKPOINTS))
    exact = float32_engine(deployed.bundle, 1)
    full = check_full(exact, source, PROMPTS, 16)
    assert full.holds, full.differences
    assert full.within_tolerance == 0
    check = check_exit(exact, source, routers, PROMPTS, 16, dividing_thresholds(source, routers, PROMPTS[2]), 4)
    assert check.holds, check.differences
    assert len(check.exits) > 1
    rounded = check_full(deployed, source, PROMPTS, 16, tolerance=TOLERANCES["int8 matmuls"])
    assert rounded.holds, (rounded.max_error, rounded.largest_logit, rounded.differences)
    assert rounded.max_error > 10 * full.max_error
    config = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "stop_token_ids": []}
    texts = [
        deployed.generate(PROMPTS[2], GenerationConfig(mode=mode, **config)).tokens for mode in ("full", "lossless")
    ]
    listed = deployed.generate(PROMPTS, GenerationConfig(mode="full", **{**config, "seed": [1, 2, 3]}))
    assert texts[0] == texts[1] == listed[2].tokens

    again = wide(kind)
    error = restore(again, deployed.bundle)
    assert error is not None
    assert 0.01 < error < 0.2
    assert torch.equal(logits(again), logits(source))
    assert torch.equal(Target.of(again).head, source.head_rows())

    model = ir.load(deployed.bundle.file("model.onnx").path)
    inline_layers(model)
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    eight, outlier = INTEGER_MATMULS[1:]
    assert kinds[outlier] + kinds[OP_GATED_MATMUL[outlier]] > LAYERS
    assert kinds[eight] + kinds[OP_GATED_MATMUL[eight]] > 0, "no mixture of both was tested"
