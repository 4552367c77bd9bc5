"""Reads models that are already quantized.

Dequantizes their weights to float32, or keeps their integers.

Called by `source.load_model` before transformers reads any weight. For GPTQ and AWQ transformers needs packages with
GPU kernels, although their format is simple (`quantized_integers`). So this module reads them while transformers loads
the model, through its interface for quantizers; likewise integers that compressed-tensors packed, and MXFP4 that is
kept. Other formats of compressed-tensors, fp8 and other mxfp4 use transformers' own dequantization.
Models with more than quantized weights (activations, other methods) raise UnsupportedModelError.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tide_export.errors import ModelError, UnsupportedModelError
from tide_export.model.fp4_matrices import MXFP4_BLOCK, NOT_A_NUMBER, Nvfp4Matrix
from tide_export.model.quantized_experts import IntegerExperts, Mxfp4Experts
from tide_export.model.quantized_integers import IntegerWeight, read_awq, read_compressed, read_gptq
from tide_export.model.quantized_modules import keep, widened

COMPRESSED = "compressed-tensors"
NVFP4 = "nvfp4"
FP8_SCALES = ("weight_scale", "weight_scale_inv")
NVFP4_PARTS = ("packed", "scale", "global_scale")
COMPRESSED_PARTS = ("packed", "scale", "shape", "zero_point", "g_idx")
MXFP4_PARAMETERS = ("gate_up_proj", "down_proj")
ADVICE = "export the model it was made from, or a version quantized by GPTQ, AWQ or compressed-tensors (weights alone)"

# Errors in the weights of the model being loaded: transformers only logs the traceback of an exception.
_problems: ContextVar[list[str]] = ContextVar("_problems")


def prepare_quantized(config: PretrainedConfig, name: str, packed: bool = False) -> str | None:
    """Changes the `config` of a quantized model so that transformers loads it as float weights.

    Args:
        packed: keep the matrices of GPTQ, AWQ, compressed-tensors and MXFP4 packed, where a bundle can hold them so:
            for `quantized_modules.widen_when_run`.

    Returns:
        A description of the quantization; None where there is none.

    Raises:
        UnsupportedModelError: more than the weights is quantized, or by an unknown method; the message names it.
        ModelError: the package that reads it is missing.
    """
    _problems.set([])
    owner = config if getattr(config, "quantization_config", None) else config.get_text_config()
    quantization = getattr(owner, "quantization_config", None)
    if not quantization:
        return None
    settings = dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
    method = str(settings.get("quant_method", "an unknown method"))
    if method not in _METHODS:
        raise UnsupportedModelError(f"{name} is quantized with {method}, which cannot be read: {ADVICE}")
    description, problem = _METHODS[method](settings)
    if problem is not None:
        raise UnsupportedModelError(f"{name} is quantized with {method} and {problem}: {ADVICE}")
    if settings["quant_method"] == "compressed-tensors":
        _require_compressed_tensors(name)
    if method == "mxfp4" and packed:
        settings |= {"quant_method": "tide_export", "layout": "mxfp4", "bits": 4}
    if settings["quant_method"] == "tide_export":
        settings["packed"] = packed
    owner.quantization_config = settings
    return description


def dequantized(
    tensors: Mapping[str, torch.Tensor], quantization: dict[str, Any] | None, name: str
) -> dict[str, torch.Tensor]:
    """Dequantizes matrices of the checkpoint `name` to float32; leaves other tensors as they are.

    Args:
        tensors: some of the checkpoint's, by name.
        quantization: the `quantization_config` of the checkpoint's config.json; None: it has none.

    Raises:
        UnsupportedModelError: as `prepare_quantized`.
        ModelError: a matrix is damaged.
    """
    config = PretrainedConfig.from_dict({"quantization_config": quantization})
    prepare_quantized(config, name)
    settings = config.quantization_config or {"quant_method": None}
    packed = _PackedConfig(**settings) if settings["quant_method"] == "tide_export" else None
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        path, _, part = key.rpartition(".")
        modules.setdefault(path, {})[part] = tensor
    weights = dict[str, torch.Tensor]()
    for path, parts in modules.items():
        scale = next((parts[part] for part in FP8_SCALES if part in parts), None)
        if packed is not None and packed.needed[0] in parts:
            matrix = widened(packed.weight(path, parts, False, None), False)
            parts = {"weight": matrix} | {part: parts[part] for part in ("bias",) if part in parts}
        elif "weight" in parts and parts["weight"].element_size() == 1:
            if scale is None:
                raise _problem(f"weight {path} is in 8 bits but has no {FP8_SCALES[0]}")
            parts = {part: tensor for part, tensor in parts.items() if part not in FP8_SCALES}
            parts["weight"] = _scaled(parts["weight"], scale, settings.get("weight_block_size") or (1, 1))
        weights |= {f"{path}.{part}" if path else part: tensor for part, tensor in parts.items()}
    return weights


def _scaled(matrix: torch.Tensor, scales: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """Multiplies `matrix` [N, K] by `scales`: one number, one a row, or one a block of rows and columns."""
    scales = scales.float().reshape(scales.shape if scales.dim() == 2 else (-1, 1))
    for dim, size in enumerate(matrix.shape):
        blocks = scales.shape[dim]
        each = block[dim] if blocks == -(-size // block[dim]) else -(-size // blocks)  # the last may be smaller
        scales = scales.repeat_interleave(each, dim).narrow(dim, 0, size)
    return matrix.float() * scales


def _gptq(settings: dict[str, Any]) -> tuple[str, str | None]:
    bits, layout = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    settings["quant_method"] = "tide_export"
    settings["layout"] = layout
    problem = None
    if layout not in ("gptq", "gptq_v2"):
        problem = f"stored in the format {layout!r}"
    elif bits not in (2, 3, 4, 8):
        problem = f"has {bits} bits a weight"
    elif any(not str(pattern).startswith("-:") for pattern in settings.get("dynamic") or {}):
        problem = "its layers differ in how they are quantized (dynamic)"
    elif settings.get("pack_dtype", "int32") != "int32":
        problem = f"packed into {settings['pack_dtype']}"
    return f"GPTQ, {bits} bits", problem


def _awq(settings: dict[str, Any]) -> tuple[str, str | None]:
    bits = settings.get("bits", settings.get("w_bit", 4))
    layout = settings.get("version", settings.get("format", "gemm"))
    settings.update(quant_method="tide_export", layout=f"awq {str(layout).lower()}", bits=bits)
    settings.setdefault("group_size", settings.get("q_group_size", 128))
    problem = None
    if settings["layout"] != "awq gemm":
        problem = f"stored in the format {str(layout)!r} instead of 'gemm'"
    elif bits != 4:
        problem = f"has {bits} bits a weight"
    return f"AWQ, {bits} bits", problem


def _compressed_tensors(settings: dict[str, Any]) -> tuple[str, str | None]:
    groups = list((settings.get("config_groups") or {}).values())
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    problem = None
    if not weights or len(weights) != len(groups) or not all(isinstance(entry, dict) for entry in weights):
        problem = "does not say how its weights are quantized (config_groups)"
    elif any(group.get(key) for group in groups for key in ("input_activations", "output_activations")):
        problem = "its activations are quantized too"
    elif settings.get("kv_cache_scheme"):
        problem = "its K/V cache is quantized too"
    elif settings.get("sparsity_config") or settings.get("transform_config"):
        problem = "it is sparse or rotated as well (sparsity_config, transform_config)"
    elif any(entry != weights[0] for entry in weights):
        problem = "its layers differ in how they are quantized (config_groups)"
    scheme: dict[str, Any] = (weights[0] if weights else None) or {}
    bits = scheme.get("num_bits", "?")
    if problem is None and settings.get("format") == "pack-quantized" and _is_packed_integers(scheme):
        size = scheme.get("group_size") or -1
        settings |= {"quant_method": "tide_export", "layout": COMPRESSED, "bits": bits, "group_size": size}
        settings["zero_points"] = not scheme.get("symmetric", True)
    if problem is None and settings.get("format") == "nvfp4-pack-quantized" and scheme.get("group_size") == 16:
        settings |= {"quant_method": "tide_export", "layout": NVFP4, "bits": 4}
    settings["dequantize"] = True
    settings.pop("run_compressed", None)
    return f"compressed-tensors, {bits} bits", problem


def _is_packed_integers(weights: dict[str, Any]) -> bool:
    """Returns whether a scheme of compressed-tensors is integers that `read_compressed` reads."""
    kind = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    return kind in {("int", bits, strategy) for bits in (4, 8) for strategy in ("group", "channel")}


def _by_transformers(settings: dict[str, Any]) -> tuple[str, str | None]:
    settings["dequantize"] = True
    return str(settings["quant_method"]), None


_METHODS: dict[str, Callable[[dict[str, Any]], tuple[str, str | None]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _by_transformers,
    "mxfp4": _by_transformers,
}


def _require_compressed_tensors(name: str) -> None:
    if find_spec("compressed_tensors") is None:
        raise ModelError(
            f"{name} is quantized with compressed-tensors, which is not installed: pip install -e '.[export]' in the "
            "clone"
        )


@register_quantization_config("tide_export")
class _PackedConfig(QuantizationConfigMixin):
    """The settings of a model whose weights are packed, for `_PackedQuantizer`."""

    def __init__(
        self,
        bits: int,
        layout: str,
        group_size: int = 128,
        packed: bool = False,
        zero_points: bool = False,
        **_other: Any,
    ):
        self.quant_method: Any = "tide_export"
        self.zero_points = zero_points  # of compressed-tensors
        self.bits, self.layout, self.group_size = int(bits), layout, int(group_size)
        self.dequantize, self.packed = True, packed

    @property
    def needed(self) -> tuple[str, ...]:
        """Returns the tensors of a packed weight; without the first it is not packed."""
        if self.layout == NVFP4:
            return tuple(f"weight_{part}" for part in NVFP4_PARTS)
        if self.layout == COMPRESSED:
            return ("weight_packed", "weight_scale", *(["weight_zero_point"] if self.zero_points else []))
        return ("qweight", "qzeros", "scales")

    def read(self, parts: dict[str, torch.Tensor]) -> IntegerWeight:
        if self.layout == "awq gemm":
            return read_awq(parts, self.group_size)
        if self.layout == COMPRESSED:
            return read_compressed(parts, self.bits, self.group_size)
        return read_gptq(parts, self.bits, self.group_size, first_version=self.layout == "gptq")

    def weight(
        self, name: str, parts: dict[str, torch.Tensor], inputs_first: bool, expected: tuple[int, ...] | None
    ) -> IntegerWeight | Nvfp4Matrix | torch.Tensor:
        needed = self.needed
        if needed[0] not in parts:
            return parts["weight"]
        missing = [part for part in needed if part not in parts]
        if missing:
            raise _problem(f"weight {name} has a {needed[0]} but no {missing[0]}")
        if self.layout == NVFP4:
            return self._nvfp4(name, parts, expected)
        integers = self.read(parts)
        (inputs, outputs), shapes = integers.shape, (integers.scales.shape, integers.zeros.shape)
        shape = (inputs, outputs) if inputs_first else (outputs, inputs)
        if expected not in (None, shape) or any(s[1] != outputs for s in shapes):
            raise _problem(f"weight {name} is packed as {shape} with {self.bits} bits, but is {expected}")
        groups = int(integers.groups.max()) + 1
        if int(integers.groups.min()) < 0 or any(s[0] < groups for s in shapes):
            raise _problem(f"weight {name} has {shapes[0][0]} groups of scales for inputs of {groups} groups")
        return integers

    def _nvfp4(self, name: str, parts: dict[str, torch.Tensor], expected: tuple[int, ...] | None) -> Nvfp4Matrix:
        codes, scales, divisor = (parts[part] for part in self.needed)
        shape = (codes.shape[0], 2 * codes.shape[1])
        if expected not in (None, shape) or tuple(scales.shape) != (shape[0], shape[1] // 16) or shape[1] % 16:
            raise _problem(f"weight {name} is packed as {shape} with scales {list(scales.shape)}, but is {expected}")
        return Nvfp4Matrix(codes.reshape(shape[0], -1, 8).numpy(), scales, divisor)


@register_quantizer("tide_export")
class _PackedQuantizer(HfQuantizer):
    """Maps the tensors of the files to weights, and names the operation that converts them."""

    serialized_names = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}  # noqa: RUF012 (transformers' way)

    def __init__(self, quantization_config: _PackedConfig, **other: Any):
        super().__init__(quantization_config, **other)
        self._mxfp4 = quantization_config.layout == "mxfp4"
        if (parts := {COMPRESSED: COMPRESSED_PARTS, NVFP4: NVFP4_PARTS}.get(quantization_config.layout)) is not None:
            self.serialized_names = {"weight": ["weight", *(f"weight_{part}" for part in parts)]}
        if self._mxfp4:
            self.serialized_names = {name: [f"{name}_blocks", f"{name}_scales"] for name in MXFP4_PARAMETERS}

    def get_load_operations(self) -> dict:
        return {"dequantize": _KeepMxfp4 if self._mxfp4 else _Dequantize}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _KeepMxfp4(ConversionOps):
    """Keeps the experts of a layer in MXFP4; the model's parameter becomes one without memory."""

    def __init__(self, hf_quantizer: _PackedQuantizer):
        pass

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        parameter = model.get_parameter_or_buffer(name)
        path, _, attribute = name.rpartition(".")
        tensors = {key.rpartition("_")[2]: one[0] if isinstance(one, list) else one for key, one in input_dict.items()}
        missing = [part for part in ("blocks", "scales") if part not in tensors]
        if missing:
            raise _problem(f"weight {name} is in MXFP4 but has no {name}_{missing[0]}")
        experts = Mxfp4Experts(tensors["blocks"], tensors["scales"])
        if experts.codes.dim() != 4 or experts.exponents.shape != experts.codes.shape[:3]:
            raise _problem(f"weight {name} has blocks {list(experts.codes.shape)} for scales of another number")
        if experts.shape != tuple(parameter.shape) or experts.codes.shape[3] * 2 != MXFP4_BLOCK:
            raise _problem(f"weight {name} is packed as {experts.shape}, but is {tuple(parameter.shape)}")
        if bool((experts.exponents == NOT_A_NUMBER).any()):
            raise _problem(f"weight {name} holds NaN or infinity")
        keep(model.get_submodule(path), attribute, experts)
        return {name: [torch.empty_like(parameter, device="meta")]}


class _Dequantize(ConversionOps):
    """Converts packed tensors to weights of the parameter's type; passes weights that are not packed.

    A weight that is kept as it is becomes one without memory. For one module the keys are the `serialized_names`, each
    with a list of one tensor. For experts in one parameter they are patterns that end in these names, each with a list
    of one tensor per expert.
    """

    def __init__(self, hf_quantizer: _PackedQuantizer):
        self.hf_quantizer = hf_quantizer
        self.settings: _PackedConfig = hf_quantizer.quantization_config  # type: ignore[assignment]

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        full_layer_name, model = kwargs["full_layer_name"], kwargs["model"]
        parameter = model.get_parameter_or_buffer(full_layer_name)
        owner = model.get_submodule(full_layer_name.rpartition(".")[0])
        modules: dict[str, dict[str, list[torch.Tensor]]] = {}
        for key, tensors in input_dict.items():
            prefix, _, part = key.rpartition(".")
            modules.setdefault(prefix, {})[part] = tensors if isinstance(tensors, list) else [tensors]
        read, inputs_first = dict[str, list[IntegerWeight | Nvfp4Matrix | torch.Tensor]](), isinstance(owner, Conv1D)
        for prefix, parts in modules.items():
            expected = None if prefix else tuple(parameter.shape)
            read[prefix] = [
                self.settings.weight(full_layer_name, dict(zip(parts, tensors, strict=True)), inputs_first, expected)
                for tensors in zip(*parts.values(), strict=True)
            ]
        attribute = full_layer_name.rpartition(".")[2]
        if self.settings.packed and list(read) == [""] and keep(owner, attribute, read[""][0]):
            return {full_layer_name: [torch.empty_like(parameter, device="meta")]}
        kept = self.settings.packed and self._keep_experts(owner, attribute, parameter, read)
        return {
            f"{prefix}.weight" if prefix else full_layer_name: [
                torch.empty(weight.shape[::-1], device="meta")  # for the model's own conversion to stack
                if kept and isinstance(weight, IntegerWeight)
                else widened(weight, inputs_first).to(parameter.dtype).contiguous()
                for weight in weights
            ]
            for prefix, weights in read.items()
        }

    def _keep_experts(
        self,
        owner: torch.nn.Module,
        attribute: str,
        parameter: torch.Tensor,
        read: dict[str, list[IntegerWeight | Nvfp4Matrix | torch.Tensor]],
    ) -> bool:
        """Keeps the matrices of all experts, by the patterns of their names, if operators multiply by them."""
        weights = [weight for weights in read.values() for weight in weights]
        integers = [weight for weight in weights if isinstance(weight, IntegerWeight)]
        if "" in read or len(integers) < len(weights) or len({len(weights) for weights in read.values()}) != 1:
            return False
        experts = IntegerExperts([*zip(*read.values(), strict=True)])
        return experts.shape == tuple(parameter.shape) and keep(owner, attribute, experts)


def _problem(sentence: str) -> ModelError:
    _problems.get().append(sentence)
    return ModelError(sentence)


def loading_problem() -> str | None:
    """Returns why the weights of a model that has just failed to load cannot be read; None if they can."""
    return next(iter(_problems.get([])), None)  # []: it failed before any weight was read
