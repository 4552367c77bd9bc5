"""The arguments of `export` as one record, checked at construction before a model is loaded."""

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, wraps
from inspect import signature
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, overload

from tide_export.bundle.manifest import (
    CUDA,
    INT8_KV,
    NETWORK_MATRICES,
    NETWORK_PRECISIONS,
    TARGETS,
    WEIGHTS,
    Quantization,
)
from tide_export.bundle.plan_fields import FP8, INT4
from tide_export.bundle.profiles import BATCH_SIZE, check_batch_size
from tide_export.calibration.config import TideConfig
from tide_export.common.values import Options
from tide_export.errors import ConfigError
from tide_export.names.operators import OP_HALF_MATMUL
from tide_export.plans.build import check_matrices, require_builder
from tide_export.quantize.settings import CALIBRATED, QUANTIZED, quantization_settings
from tide_export.runtime.tensorrt.flavours import FLAVOURS, Flavour
from tide_export.runtime.tensorrt.plugins import NONE, PluginLibrary, plugins_to_build_with

P = ParamSpec("P")
AUTO = "auto"
CUDA_WEIGHTS = (AUTO, "bf16", "fp16", INT4)  # GroupQueryAttention has no kernel in float32


@dataclass(frozen=True)
class ExportRequest(Options):
    """A request to export a model to a bundle, checked at construction.

    Args:
        model: folder, Hugging Face hub id or GGUF file.
        output: folder of the bundle; missing parent folders are created.
        routers: a router file, or "model": the exit gate of a looped model; None: routers are calibrated first.
        config: calibration settings and the bundle's default thresholds, min_layers, max_pending and
            compaction_threshold.
        targets: "onnxruntime", which every bundle has, and one of "cuda", "tensorrt" and "tensorrt-rtx", which add
            segment networks, the last two plans as well.
        weights: precision of the weights. Only for ONNX Runtime: "fp32", "bf16", "fp16", "int8" or "int4" for the
            graph's matrices. With "cuda": "bf16", "fp16" or "int4", of graph and networks. With TensorRT: "fp32",
            "fp16" or "bf16" for the segment networks, and the graph is fp32; or "int4" or "fp8" for the layers'
            matrices in networks and graph (which stores fp8 as float32). "auto", for ONNX Runtime: the integers of a
            GPTQ or AWQ model; else bf16 or fp16 if that is lossless and its operators are installed; else fp32,
            with "cuda" fp16.
        quantization, block_size, accuracy_level, symmetric, bits: options of int8 and int4 (see `quantize.settings`);
            accuracy_level also applies to the model's own integers.
        engines: build TensorRT plans; without, `plans.rebuild` can add them to the bundle.
        plugins: plugin library for plans of "tensorrt", or "none"; None: an installed one, if any.
        overwrite: replace an existing bundle, which is unchanged until the new one is complete.
        validate: compare the finished graph with the model (see `verify.export_gate`) before it is moved into place.
        report: write a report of the gains into the bundle (report.html, report.png) if routers are calibrated.
        max_length: maximum sequence length in tokens; None: the model's context.
        lora_rank: maximum rank of the low-rank adapters that a runtime may load for the linear layers of the decoder
            layers; 0: no adapters.
        draft_head: a published EAGLE-3 or DFlash head or Gemma 4 assistant, folder or hub id; the model itself, for the
            MTP layer in its checkpoint; or "none". None: for ONNX Runtime alone, that MTP layer if there is one and
            drafts by it are measured to pay here.
        batch_size: maximum sequences per step of segment networks; None: `bundle.profiles.BATCH_SIZE`.
        device_map: "auto" (or accelerate's map by module) for a model larger than the memory: its layers stay on other
            devices or on disk, and each weight is read when it is written.
        trust_remote_code: run Python code from the model's folder (see `model.source.load_model`).

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another.
        ProviderError, BuildError: this machine cannot build the requested plans.
    """

    error = ConfigError
    model: str
    output: str | os.PathLike[str]
    _: KW_ONLY
    routers: str | os.PathLike[str] | None = None
    config: TideConfig = field(default_factory=TideConfig)
    targets: Sequence[str] = ("onnxruntime",)
    weights: str = AUTO
    quantization: str | None = None
    block_size: int | None = None
    accuracy_level: int | None = None
    symmetric: bool | None = None
    bits: float | None = None
    engines: bool = True
    plugins: str | os.PathLike[str] | None = None
    overwrite: bool = False
    validate: bool = True
    report: bool = True
    max_length: int | None = None
    lora_rank: int = 0
    draft_head: str | None = None
    batch_size: int | None = None
    device_map: str | dict[str, Any] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config or TideConfig())  # None: the defaults
        if self.flavour is not None and self.weights == AUTO:
            object.__setattr__(self, "weights", "fp32")
        _ = self.quantization_settings
        self._check_targets()
        self._check_kv_cache()
        self._check_lora()
        self._check_draft_head()
        if self.batch_size is not None and self.network_target is None:
            raise ConfigError(
                "batch_size is for targets cuda, tensorrt and tensorrt-rtx: onnxruntime takes batches as they come"
            )
        check_batch_size(self.max_batch_size)
        if not (self.engines and self.flavour) and self.plugins not in (None, NONE):
            raise ConfigError("--plugins is for building plans of target tensorrt, and none are built here: omit it")
        _ = self.plugin_library

    @property
    def flavour(self) -> Flavour | None:
        """The flavour of TensorRT among the targets, or None."""
        return next((FLAVOURS[target] for target in self.targets if target in FLAVOURS), None)

    @property
    def network_target(self) -> str | None:
        """The target that has segment networks, or None."""
        return next((target for target in self.targets if target in (CUDA, *FLAVOURS)), None)

    @property
    def for_cuda(self) -> bool:
        return self.network_target == CUDA

    @cached_property
    def plugin_library(self) -> PluginLibrary | None:
        """The plugin library that plans are built with, or None; searched once."""
        if self.flavour is None or not self.engines:
            return None
        version = require_builder(self.flavour)
        check_matrices(self.flavour, self.weights)
        return plugins_to_build_with(self.flavour, version, self.plugins)

    @property
    def quantization_settings(self) -> Quantization | None:
        settings = quantization_settings(
            self.weights, self.quantization, self.block_size, self.accuracy_level, self.symmetric, self.bits
        )
        return settings if settings is None or self.flavour is None else replace(settings, budget=None)

    @property
    def half(self) -> str | None:
        """The 16-bit type of the graph's matrices, bf16 or fp16, or None."""
        return self.weights if self.flavour is None and self.weights in OP_HALF_MATMUL else None

    @property
    def loading(self) -> dict[str, Any]:
        """The options of `load_model`, which keeps the integers of a GPTQ or AWQ model if possible."""
        packed = self.weights == AUTO and self.device_map is None
        return {"device_map": self.device_map, "trust_remote_code": self.trust_remote_code, "packed": packed}

    @property
    def reads_text_for_weights(self) -> bool:
        """Whether quantizing the weights needs text."""
        settings = self.quantization_settings
        return self.weights == FP8 or (settings is not None and settings.method in CALIBRATED)

    def network_weights(self, exact_in: tuple[str, ...]) -> str:
        """Returns the precision of segment networks.

        Args:
            exact_in: the types that represent all weights of the model exactly (see `SourceModel`).
        """
        return self.weights if self.weights in NETWORK_PRECISIONS else (*exact_in, "fp16")[0]

    @property
    def max_batch_size(self) -> int:
        return BATCH_SIZE if self.batch_size is None else self.batch_size

    def _check_kv_cache(self) -> None:
        if self.config.kv_cache == INT8_KV and self.network_target is not None:
            raise ConfigError(f"kv_cache int8 is for target onnxruntime alone, not for {self.network_target}")

    def _check_lora(self) -> None:
        if isinstance(self.lora_rank, bool) or not isinstance(self.lora_rank, int) or self.lora_rank < 0:
            raise ConfigError(f"lora_rank must be a whole number, 0 or more, not {self.lora_rank!r}")
        if self.lora_rank and self.network_target is not None:
            raise ConfigError(
                f"lora_rank is for target onnxruntime alone: networks of {self.network_target} read no adapters"
            )

    @property
    def reads_own_head(self) -> bool:
        """Whether `draft_head` is the model itself."""
        return self.draft_head is not None and _same(self.draft_head, self.model)

    @property
    def looks_for_own_head(self) -> bool:
        """Whether an MTP layer in the checkpoint is read without being asked for."""
        return self.draft_head is None and self.network_target is None and self.device_map is None

    def _check_draft_head(self) -> None:
        if self.draft_head not in (None, NONE) and self.network_target is not None and not self.reads_own_head:
            raise ConfigError(
                f"a published head as draft_head is for target onnxruntime alone: it reads hidden states or K/V that "
                f"the segment networks of {self.network_target} do not give; use draft"
            )

    def _check_targets(self) -> None:
        for target in self.targets:
            if target not in TARGETS:
                raise ConfigError(f"target {target!r} is none of {', '.join(TARGETS)}")
        known = (AUTO, *NETWORK_PRECISIONS, *QUANTIZED, FP8)
        if self.weights not in known:
            raise ConfigError(f"weights {self.weights!r} are not in this release: use one of {', '.join(known)}")
        if len({target for target in self.targets if target in (CUDA, *FLAVOURS)}) > 1:
            raise ConfigError(
                "a bundle holds the segment networks of one target: give one of cuda, tensorrt and tensorrt-rtx"
            )
        if self.for_cuda and self.weights not in CUDA_WEIGHTS:
            raise ConfigError(f"target cuda takes weights bf16, fp16 or int4, not {self.weights!r}")
        if self.flavour is not None and self.weights not in (AUTO, *NETWORK_PRECISIONS, *NETWORK_MATRICES):
            raise ConfigError(
                f"weights {self.weights!r} are for target onnxruntime alone: {self.flavour.name} takes fp32, fp16, "
                "bf16, int4 or fp8"
            )
        if self.network_target is not None and self.bits is not None:
            raise ConfigError(f"--bits is for target onnxruntime, and {self.network_target} takes no mixture: omit it")
        if self.network_target is not None and self.symmetric is False:
            raise ConfigError(f"--symmetric no is for target onnxruntime: {self.network_target} takes no zero points")
        if self.flavour is None and self.weights not in (AUTO, *WEIGHTS):
            raise ConfigError(
                f"weights {self.weights!r} are for targets tensorrt and tensorrt-rtx: onnxruntime takes fp32, bf16, "
                "fp16, int8 or int4"
            )


def _same(head: str, model: str) -> bool:
    return head == model or (Path(head).exists() and Path(model).exists() and Path(head).samefile(model))


class TakesRequest(Protocol, Generic[P]):
    """A function of an `ExportRequest`, or of its fields."""

    @overload
    def __call__(self, request: ExportRequest, /) -> Path: ...
    @overload
    def __call__(self, *args: P.args, **fields: P.kwargs) -> Path: ...


def _taking_fields(make: Callable[P, ExportRequest]) -> Callable[[Callable[[ExportRequest], Path]], TakesRequest[P]]:
    def decorate(function: Callable[[ExportRequest], Path]) -> TakesRequest[P]:
        @wraps(function)
        def call(*args: Any, **fields: Any) -> Path:
            ready = not fields and len(args) == 1 and isinstance(args[0], ExportRequest)
            return function(args[0] if ready else make(*args, **fields))

        call.__signature__ = signature(make)  # type: ignore[attr-defined]
        return call

    return decorate


takes_request = _taking_fields(ExportRequest)
