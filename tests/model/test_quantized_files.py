"""Prequantized models: what `packed_models` and this file pack must be read back as exactly the weights that
its integers stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from packed_models import (
    AWQ,
    FP8,
    GPT2,
    GPTQ,
    GROUP,
    IDS,
    INT4,
    INT8,
    LLAMA,
    MIXTRAL,
    NVFP4,
    QUANTIZED,
    V2,
    Quantizer,
    Tensors,
    awq,
    compressed,
    compressed_words,
    float_twin,
    fp8,
    gptq,
    nvfp4,
    replace,
    write,
    write_mxfp4,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tide_export.cli.main import main
from tide_export.errors import ModelError, UnsupportedModelError
from tide_export.model.quantized_files import dequantized
from tide_export.model.quantized_integers import read_compressed
from tide_export.model.source import load_model


def symmetric(matrix: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signed integers [N, K] of `matrix` [K, N], scales float32 [N, G] and what they stand for [K, N]."""
    rows, top = matrix.T, 2 ** (bits - 1) - 1
    scales = np.abs(rows.reshape(len(rows), -1, group)).max(axis=-1).astype(np.float32) / top
    wide = np.repeat(scales, group, axis=1)
    integers = np.clip(np.round(rows / wide), -top - 1, top)
    return integers.astype(np.int64), scales, (integers.astype(np.float32) * wide).T


def compressed_bytes(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    integers, scales, dense = symmetric(matrix, 8, len(matrix))
    return {"weight": integers.astype(np.int8), "weight_scale": scales}, dense


CASES: dict[str, tuple[Any, dict[str, Any], Quantizer, bool]] = {
    "gptq": (LLAMA, GPTQ, gptq(), False),
    "gptq, 8 bits": (LLAMA, GPTQ | {"bits": 8}, gptq(8), False),
    "gptq, 3 bits": (LLAMA, GPTQ | {"bits": 3}, gptq(3), False),
    "gptq, 2 bits, second version": (LLAMA, GPTQ | V2 | {"bits": 2}, gptq(2, second_version=True), False),
    "gptq, order of activations": (LLAMA, GPTQ | V2 | {"desc_act": True}, gptq(4, True, act_order=True), False),
    "gptq, inputs first": (GPT2, GPTQ, gptq(), True),
    "gptq, experts": (MIXTRAL, GPTQ, gptq(), False),
    "awq": (LLAMA, AWQ, awq, False),
    "awq, experts": (MIXTRAL, AWQ, awq, False),
    "compressed-tensors, packed": (LLAMA, compressed("pack-quantized", INT4), compressed_words(), False),
    "compressed-tensors, zero points": (
        *(LLAMA, compressed("pack-quantized", INT4 | {"symmetric": False}), compressed_words(zeros=True), False),
    ),
    "compressed-tensors, 8 bits": (LLAMA, compressed("int-quantized", INT8), compressed_bytes, False),
    "compressed-tensors, nvfp4": (LLAMA, compressed("nvfp4-pack-quantized", NVFP4), nvfp4, False),
    "fp8": (LLAMA, FP8, fp8, False),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_integers_stand_for(case: str, tmp_path: Path) -> None:
    config, settings, quantize, inputs_first = CASES[case]
    tensors, _ = write(tmp_path / "model", config, settings, quantize, inputs_first)
    expected = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    source = load_model(str(tmp_path / "model"))
    found = source.model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(source.run(IDS, []).logits, expected(IDS).logits)


def test_mxfp4_is_read_on_a_cpu(tmp_path: Path) -> None:
    """Experts in blocks of 32 4-bit floating-point numbers, by transformers: every number is one of bfloat16."""
    dense = write_mxfp4(tmp_path)
    source = load_model(tmp_path)
    assert len(dense) == 4
    for name, values in dense.items():
        assert torch.equal(source.model.get_parameter(name), values), name
    assert source.exact_in == ("bf16",)


def test_compressed_zero_points_are_those_of_its_own_package() -> None:
    """transformers 5.23 cannot load them compressed, so the package itself decompresses one matrix."""
    matrix = np.random.default_rng(0).standard_normal((96, 40)).astype(np.float32)
    parts, dense = compressed_words(zeros=True)(matrix)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**INT4 | {"symmetric": False}))
    theirs = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    ours = read_compressed(tensors, 4, GROUP).dequantize().T
    np.testing.assert_array_equal(ours.numpy(), dense.T.astype(np.float32))
    np.testing.assert_allclose(theirs.float().numpy(), ours.numpy(), rtol=1e-3, atol=1e-3)  # scales are float16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, which cannot be read"),
    "nvfp4": ({"quant_method": "nvfp4"}, "nvfp4, which cannot be read"),
    "no method": ({"bits": 4}, "an unknown method, which cannot be read"),
    "gptq, marlin": (GPTQ | {"checkpoint_format": "marlin"}, "gptq and stored in the format 'marlin'"),
    "gptq, 5 bits": (GPTQ | {"bits": 5}, "gptq and has 5 bits a weight"),
    "gptq, dynamic": (GPTQ | {"dynamic": {r"+:.*\.0\..*": {"bits": 8}}}, "gptq and its layers differ"),
    "awq, gemv": (AWQ | {"version": "GEMV"}, "awq and stored in the format 'GEMV' instead of 'gemm'"),
    "activations": (compressed("int-quantized", INT8, input_activations=INT8), "its activations are quantized too"),
    "K/V cache": (compressed("int-quantized", INT8) | {"kv_cache_scheme": INT8}, "its K/V cache is quantized too"),
    "sparse": (compressed("int-quantized", INT8) | {"sparsity_config": {"format": "x"}}, "it is sparse or rotated"),
    "no groups": ({"quant_method": "compressed-tensors"}, "does not say how its weights are quantized"),
}


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "model"
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case: str, float_model: Path) -> None:
    settings, sentence = REFUSED[case]
    replace(float_model, settings)
    with pytest.raises(UnsupportedModelError, match="export the model it was made from") as caught:
        load_model(str(float_model))
    assert sentence in str(caught.value)
    assert str(float_model) in str(caught.value)


def test_the_command_says_it_in_one_line(float_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(float_model, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert main(["export", str(float_model), "-o", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("tide-export: error: ")
    assert "is quantized with bitsandbytes, which cannot be read" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rows", "columns"), [(72, 40), (64, 96), (33, 1)])
def test_blocks_of_fp8_that_do_not_divide_a_matrix(rows: int, columns: int) -> None:
    scales = torch.rand(-(-rows // 32), -(-columns // 32)) + 0.5
    matrix = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    found = dequantized({"a.weight": matrix, "a.weight_scale_inv": scales}, FP8, "a model")["a.weight"]
    wide = scales[(torch.arange(rows) // 32)[:, None], torch.arange(columns) // 32]
    assert torch.equal(found, matrix.float() * wide)


def test_fp8_whose_config_does_not_say_so_is_refused(tmp_path: Path) -> None:
    """As ModelOpt writes it, beside `hf_quant_config.json`: transformers alone would read it without its scales."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in filter(QUANTIZED.search, list(tensors)):
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors |= {f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": torch.tensor(0.1)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match=r"is quantized, as .*scale says, and its config\.json does not say how"):
        load_model(str(folder))


SPOILED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.scales"), "has a qweight but no scales"),
    "too short": (
        lambda tensors: tensors.update({"lm_head.qweight": tensors["lm_head.qweight"][1:]}),
        "lm_head.weight is packed as",
    ),
    "too few groups": (
        lambda tensors: tensors.update({"lm_head.scales": tensors["lm_head.scales"][:1]}),
        "lm_head.weight has 1 groups of scales for inputs of 2 groups",
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_packed_tensors_that_do_not_fit_are_named(how: str, tmp_path: Path) -> None:
    _, tensors = write(tmp_path / "model", LLAMA, GPTQ, gptq())
    spoil, sentence = SPOILED[how]
    spoil(tensors)
    replace(tmp_path / "model", GPTQ, tensors)
    with pytest.raises(ModelError, match="cannot load the weights of model") as caught:
        load_model(str(tmp_path / "model"))
    assert sentence in str(caught.value)


ZEROS = compressed("pack-quantized", INT4 | {"symmetric": False})
UP = "model.layers.0.mlp.up_proj.weight"
SPOILED_FP4 = {
    "nvfp4 without the divisor": (lambda tensors: tensors.pop(f"{UP}_global_scale"), "but no weight_global_scale"),
    "nvfp4, too few scales": (lambda tensors: tensors.update({f"{UP}_scale": tensors[f"{UP}_scale"][:1]}), "packed as"),
    "no zero points": (lambda tensors: tensors.pop(f"{UP}_zero_point"), "but no weight_zero_point"),
}


@pytest.mark.parametrize("how", SPOILED_FP4)
def test_tensors_of_compressed_tensors_that_do_not_fit_are_named(how: str, tmp_path: Path) -> None:
    settings = compressed("nvfp4-pack-quantized", NVFP4) if how.startswith("nvfp4") else ZEROS
    quantize = nvfp4 if how.startswith("nvfp4") else compressed_words(zeros=True)
    _, tensors = write(tmp_path / "model", LLAMA, settings, quantize)
    spoil, sentence = SPOILED_FP4[how]
    spoil(tensors)
    replace(tmp_path / "model", settings, tensors)
    with pytest.raises(ModelError, match="cannot load the weights of model") as caught:
        load_model(str(tmp_path / "model"))
    assert sentence in str(caught.value)


SPOILED_MXFP4 = {
    "no scales": (lambda tensors, name: tensors.pop(f"{name}_scales"), "is in MXFP4 but has no"),
    "too few scales": (
        lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:1]}),
        "for scales of another number",
    ),
    "too few blocks": (
        lambda tensors, name: tensors.update(
            {f"{name}_{part}": tensors[f"{name}_{part}"][:, :1].contiguous() for part in ("blocks", "scales")}
        ),
        "is packed as",
    ),
    "not a number": (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), "holds NaN or infinity"),
}


@pytest.mark.parametrize("how", SPOILED_MXFP4)
def test_mxfp4_that_does_not_fit_is_named(how: str, tmp_path: Path) -> None:
    name = sorted(write_mxfp4(tmp_path))[0]
    tensors = load_file(tmp_path / "model.safetensors")
    spoil, sentence = SPOILED_MXFP4[how]
    spoil(tensors, name)
    replace(tmp_path, {"quant_method": "mxfp4"}, tensors)
    with pytest.raises(ModelError, match="cannot load the weights of model") as caught:
        load_model(tmp_path, packed=True)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "quantize"),
    [(INT4, compressed_words()), (INT8, compressed_words(8, whole=True))],
    ids=["int4", "int8, one scale a row"],
)
def test_compressed_tensors_computes_what_transformers_computes(
    scheme: dict[str, Any], quantize: Quantizer, tmp_path: Path
) -> None:
    """Read by transformers' other way: left compressed, decompressed when the model first runs."""
    write(tmp_path / "model", LLAMA, compressed("pack-quantized", scheme), quantize)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    ours = load_model(str(tmp_path / "model")).run(IDS, []).logits
    assert torch.allclose(theirs(IDS).logits, ours, atol=1e-5)
