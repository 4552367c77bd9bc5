"""Packed models to test with: a tiny model is quantized by rounding and packed by loops that share nothing with
the reader, in the format's own layout; and the float model that it stands for."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig

from tide_export.model.source import auto_class

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


def rounded(
    matrix: np.ndarray, bits: int, groups: np.ndarray, lowest: int = 0, symmetric: bool = False
) -> tuple[np.ndarray, ...]:
    """Integers [K, N], scales float16 [G, N], zeros [G, N] of `matrix` [K, N] by rounding to nearest, and what they
    stand for."""
    top = 2**bits - 1
    members = [matrix[groups == group] for group in range(groups.max() + 1)]
    low = np.array([np.minimum(rows.min(axis=0), 0) for rows in members])
    high = np.array([np.maximum(rows.max(axis=0), 0) for rows in members])
    if symmetric:  # the zero point, rounded below, is then the middle one
        high = np.maximum(high, -low)
        low = -high * 2 ** (bits - 1) / (top - 2 ** (bits - 1))
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


def gptq(
    bits: int = 4, second_version: bool = False, act_order: bool = False, symmetric: bool = False, group: int = GROUP
) -> Quantizer:
    def quantize(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        groups = np.arange(len(matrix)) // (group if group > 0 else len(matrix))
        if act_order:
            groups = np.random.default_rng(0).permutation(groups)
        lowest = 0 if second_version else 1
        integers, scales, zeros, dense = rounded(matrix, bits, groups, lowest, symmetric)
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


def nvfp4(matrix: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Codes of E2M1 in blocks of 16 with a scale of E4M3 each, and one number that all scales are divided by."""
    rows = torch.from_numpy(np.ascontiguousarray(matrix.T))
    blocks = rows.reshape(len(rows), -1, 16)
    whole = torch.tensor([448 * 6 / float(rows.abs().max())])
    scales = (blocks.abs().amax(dim=-1) / 6 * whole).to(torch.float8_e4m3fn)
    wide = (scales.float() / whole)[..., None]
    numbers = torch.tensor(E2M1)
    codes = ((blocks / wide).abs()[..., None] - numbers).abs().argmin(dim=-1)
    dense = numbers[codes] * blocks.sign() * wide
    codes = (codes + 8 * (blocks < 0)).reshape(len(rows), -1).to(torch.uint8)
    parts = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_global_scale": whole}
    return parts, dense.reshape(rows.shape).T.numpy()


def fp8(matrix: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Blocks of 32 x 32 with a scale each."""
    rows = torch.from_numpy(np.ascontiguousarray(matrix.T))
    blocks = rows.reshape(len(rows) // 32, 32, -1, 32)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    wide = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    small = (rows / wide).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scales}, (small.float() * wide).T.numpy()


def fp8_rows(matrix: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """A scale a row."""
    rows = torch.from_numpy(np.ascontiguousarray(matrix.T))
    scales = rows.abs().amax(dim=1, keepdim=True) / 448
    small = (rows / scales).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scales}, (small.float() * scales).T.numpy()


def compressed_words(bits: int = 4, whole: bool = False, zeros: bool = False) -> Quantizer:
    """`whole`: one scale a row."""

    def quantize(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        groups = np.arange(len(matrix)) // (len(matrix) if whole else GROUP)
        integers, scales, middles, dense = rounded(matrix, bits, groups, symmetric=not zeros)
        parts = {"weight_packed": dense_words(integers, bits).T, "weight_scale": scales.T}
        if zeros:
            parts["weight_zero_point"] = dense_words(middles.T, bits)
        return parts | {"weight_shape": np.array(matrix.shape[::-1])}, dense

    return quantize


def compressed(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        "ignore": [],
    }


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
    """A matrix per expert, as Mixtral's files have them; transformers keeps all experts of a layer in one."""
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


def write_mxfp4(folder: Path) -> Tensors:
    """Writes a gpt-oss model whose experts are in MXFP4; gives their parameters, float32 [E, K, N]."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT_OSS).bfloat16()
    model.save_pretrained(folder)
    tensors, dense = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
        scales = torch.randint(118, 126, (experts, outputs, inputs // 32))
        values = torch.tensor(E2M1)[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales[..., None] - 127)
        dense[name] = values.reshape(experts, outputs, inputs).transpose(1, 2)
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    replace(folder, {"quant_method": "mxfp4"}, tensors)
    return dense


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


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
V2 = {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
GPT2 = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # the numbers of three bits of MXFP4; the fourth is the sign
GPT_OSS = GptOssConfig(
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "hidden_size": 64},
    **{"intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": 16},
)
MIXTRAL = MixtralConfig(**LLAMA.to_diff_dict() | {"num_local_experts": 4, "num_experts_per_tok": 2})
