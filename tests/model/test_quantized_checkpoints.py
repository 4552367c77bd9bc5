"""Prequantized checkpoints: a tiny model is quantized here by rounding, packed by loops that share nothing with the
reader, written in the format's own layout, and must be read back as exactly the weights its integers stand for."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from tide_export.cli.main import main
from tide_export.config import TideConfig
from tide_export.errors import ModelError, UnsupportedModelError
from tide_export.model.source import auto_class, load_model
from tide_export.pipeline.flow import export
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import load

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
GROUP = 32
QUANTIZED = re.compile(r"(_proj|\.w[123]|c_attn|c_fc|lm_head)\.weight$")
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
IDS = torch.tensor([[5, 9, 2, 44, 17, 60, 3, 3, 21, 8]])

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]


def rounded(matrix: np.ndarray, bits: int, groups: np.ndarray, lowest: int = 0) -> tuple[np.ndarray, ...]:
    """Integers [K, N], scales float16 [G, N], zeros [G, N] of `matrix` [K, N] by rounding to nearest, and what they
    stand for."""
    top = 2**bits - 1
    members = [matrix[groups == group] for group in range(groups.max() + 1)]
    low = np.array([np.minimum(rows.min(axis=0), 0) for rows in members])
    high = np.array([np.maximum(rows.max(axis=0), 0) for rows in members])
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), lowest, top)
    wide = scales.astype(np.float32)[groups]
    integers = np.clip(np.round(matrix / wide) + zeros[groups], 0, top)
    return integers.astype(np.int64), scales, zeros.astype(np.int64), (integers - zeros[groups]) * wide


def dense_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers [R, C] as a stream of bits per column, cut into int32 words [R * bits / 32, C]."""
    words = np.zeros((len(numbers) * bits // 32, numbers.shape[1]), dtype=np.uint32)
    for row in range(len(numbers)):
        for bit in range(bits):
            place = row * bits + bit
            words[place // 32] |= (((numbers[row] >> bit) & 1) << (place % 32)).astype(np.uint32)
    return words.view(np.int32)


def gptq(bits: int = 4, second_version: bool = False, act_order: bool = False) -> Quantizer:
    def quantize(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        groups = np.arange(len(matrix)) // GROUP
        if act_order:
            groups = np.random.default_rng(0).permutation(groups)
        integers, scales, zeros, dense = rounded(matrix, bits, groups, lowest=0 if second_version else 1)
        stored = zeros if second_version else zeros - 1
        parts = {"qweight": dense_words(integers, bits), "qzeros": dense_words(stored.T, bits).T, "scales": scales}
        return parts | ({"g_idx": groups.astype(np.int32)} if act_order else {}), dense

    return quantize


def awq(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    integers, scales, zeros, dense = rounded(matrix, 4, np.arange(len(matrix)) // GROUP)

    def packed(numbers: np.ndarray) -> np.ndarray:
        words = np.zeros((len(numbers), numbers.shape[1] // 8), dtype=np.uint32)
        for column in range(words.shape[1]):
            for nibble, place in enumerate(AWQ_COLUMNS):
                words[:, column] |= (numbers[:, column * 8 + place] << (4 * nibble)).astype(np.uint32)
        return words.view(np.int32)

    return {"qweight": packed(integers), "qzeros": packed(zeros), "scales": scales}, dense


def symmetric(matrix: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signed integers [N, K] of `matrix` [K, N], scales float32 [N, G] and what they stand for [K, N]."""
    rows, top = matrix.T, 2 ** (bits - 1) - 1
    scales = np.abs(rows.reshape(len(rows), -1, group)).max(axis=-1).astype(np.float32) / top
    wide = np.repeat(scales, group, axis=1)
    integers = np.clip(np.round(rows / wide), -top - 1, top)
    return integers.astype(np.int64), scales, (integers.astype(np.float32) * wide).T


def compressed_words(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    integers, scales, dense = symmetric(matrix, 4, GROUP)
    words = dense_words((integers + 8).T, 4).T
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array(integers.shape)}, dense


def compressed_bytes(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    integers, scales, dense = symmetric(matrix, 8, len(matrix))
    return {"weight": integers.astype(np.int8), "weight_scale": scales}, dense


def fp8(matrix: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Blocks of 32 x 32 with a scale each."""
    rows = torch.from_numpy(np.ascontiguousarray(matrix.T))
    blocks = rows.reshape(len(rows) // 32, 32, -1, 32)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    wide = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    small = (rows / wide).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scales}, (small.float() * wide).T.numpy()


def write(
    folder: Path, config: Any, settings: dict[str, Any], quantize: Quantizer, inputs_first: bool = False
) -> tuple[Tensors, Tensors]:
    """Writes a random model of `config` whose layers' matrices are quantized; gives the float tensors it stands for,
    by their names in the file, and the packed ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tensors, dense = with_experts_apart(load_file(folder / "model.safetensors")), {}
    for name in filter(QUANTIZED.search, list(tensors)):
        matrix = tensors.pop(name).float()
        parts, meant = quantize((matrix if inputs_first else matrix.T).numpy())
        dense[name] = torch.from_numpy(np.ascontiguousarray(meant if inputs_first else meant.T)).float()
        for part, array in parts.items():
            tensors[f"{name.removesuffix('weight')}{part}"] = (
                array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
            )
    assert dense
    replace(folder, settings, tensors)
    return {
        **{name: value for name, value in tensors.items() if value.is_floating_point() and "scale" not in name},
        **dense,
    }, tensors


def with_experts_apart(tensors: Tensors) -> Tensors:
    """A matrix per expert, as checkpoints of Mixtral have them; transformers keeps all experts of a layer in one."""
    apart = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        if not prefix.endswith("experts"):
            apart[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"w2": matrix} if kind == "down_proj" else dict(zip(("w1", "w3"), matrix.chunk(2), strict=True))
            apart |= {f"{prefix}.{expert}.{part}.weight": value.contiguous() for part, value in parts.items()}
    return apart


def replace(folder: Path, settings: dict[str, Any], tensors: Tensors | None = None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def float_twin(folder: Path, twin: Path, tensors: Tensors) -> Any:
    """The float32 model of the same config with `tensors` as its weights, read by transformers alone."""
    twin.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    save_file(
        {name: value.float().contiguous() for name, value in tensors.items()},
        twin / "model.safetensors",
        {"format": "pt"},
    )
    kind = auto_class(AutoConfig.from_pretrained(twin))
    return kind.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
V2 = {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPT2 = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
MIXTRAL = MixtralConfig(**LLAMA.to_diff_dict() | {"num_local_experts": 4, "num_experts_per_tok": 2})
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def compressed(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        "ignore": [],
    }


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
    "compressed-tensors, packed": (LLAMA, compressed("pack-quantized", INT4), compressed_words, False),
    "compressed-tensors, 8 bits": (LLAMA, compressed("int-quantized", INT8), compressed_bytes, False),
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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, which cannot be read"),
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


def test_compressed_tensors_computes_what_transformers_computes(tmp_path: Path) -> None:
    """Read by transformers' other way: left compressed, decompressed when the model first runs."""
    write(tmp_path / "model", LLAMA, compressed("pack-quantized", INT4), compressed_words)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    ours = load_model(str(tmp_path / "model")).run(IDS, []).logits
    assert torch.allclose(theirs(IDS).logits, ours, atol=1e-5)


def test_a_quantized_model_is_exported_as_the_weights_it_stands_for(tmp_path: Path) -> None:
    tensors, _ = write(tmp_path / "model", LLAMA, GPTQ, gptq())
    twin = float_twin(tmp_path / "model", tmp_path / "twin", tensors)
    routers = random_routers(load_model(tmp_path / "twin"), (1,), IDS[0].tolist(), bottleneck=8)
    routers.save(tmp_path / "routers.safetensors")
    config = TideConfig(checkpoints=(1,), min_layers=1)
    bundle = export(str(tmp_path / "model"), tmp_path / "out", routers=tmp_path / "routers.safetensors", config=config)
    prompt = IDS[0].tolist()
    expected = twin.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, len(prompt) :
    ]
    assert load(bundle).generate(prompt, max_new_tokens=8, mode="full", stop_token_ids=[]).tokens == expected.tolist()
