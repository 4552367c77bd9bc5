"""Describes how TensorRT and TensorRT for RTX differ: names, packages, and where plans run.

`plans.build` builds with a flavour and `runtime.tensorrt.plans` runs its plans; they share everything else.
"""

import importlib
import logging
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tide_export.common.files import user_cache
from tide_export.errors import BundleError, ProviderError, TideError
from tide_export.runtime.tensorrt.gpu import device_name
from tide_export.runtime.tensorrt.kernel_cache import KernelCache

logger = logging.getLogger("tide_export")


@dataclass(frozen=True)
class Flavour:
    """Describes one of the two libraries.

    Attributes:
        name: the target and provider: tensorrt, tensorrt-rtx.
        title: its name in messages.
        module: the module to import.
        package: the distribution of the module.
        extra: the extra of tide_export that installs it.
        builds_without_gpu: whether plans can be built on a machine without a GPU.
        has_timing_cache: whether building times kernels, so that caching the times saves time.
        has_plugins: whether its networks may use plugins; else function bodies are built.
        reads_headers: whether it can tell from a plan's header that the plan runs here.
        decode_tokens: maximum tokens of the decoding profile. TensorRT has kernels for exactly one; TensorRT for RTX
            stores the weights of a profile with a single shape twice, also in the layout of matrix-vector products.
        folds_queries: whether the query heads of one K/V head are lowered as rows of one head. TensorRT for RTX 1.7.1
            otherwise copies K/V for each of them in every run; TensorRT's kernels for one token take one row a head.
        compute_capabilities: of the GPUs that its plans run on; empty: only the GPU they are built on.
    """

    name: str
    title: str
    module: str
    package: str
    extra: str
    builds_without_gpu: bool
    has_timing_cache: bool
    has_plugins: bool
    reads_headers: bool
    decode_tokens: int
    folds_queries: bool
    compute_capabilities: tuple[str, ...]


# TensorRT for RTX builds for the GPUs it supports from Ampere on, without Hopper and data center Blackwell.
RTX_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")
FP8_CAPABILITY = (8, 9)  # the first with FP8 matmuls
TENSORRT = Flavour("tensorrt", "TensorRT", "tensorrt", "tensorrt", "gpu", False, True, True, False, 1, False, ())
TENSORRT_RTX = Flavour(
    *("tensorrt-rtx", "TensorRT for RTX", "tensorrt_rtx", "tensorrt-rtx", "rtx"),
    *(True, False, False, True),
    decode_tokens=2,
    folds_queries=True,
    compute_capabilities=RTX_CAPABILITIES,
)
FLAVOURS = {flavour.name: flavour for flavour in (TENSORRT, TENSORRT_RTX)}


def warn_of_copies(flavour: Flavour, copied: Mapping[str, int]) -> None:
    """Logs a warning for every network that copies buffers instead of updating them in place.

    Args:
        copied: bytes copied in a run over one sequence, by network.
    """
    for name, count in copied.items():
        logger.warning(
            "%s copies buffers that %s is to update in place: %d bytes in a run over one sequence",
            *(flavour.title, name, count),
        )


def import_library(flavour: Flavour) -> ModuleType:
    """Imports the flavour's Python module.

    Raises:
        ProviderError: it is not installed or does not load; names the package.
    """
    try:
        return importlib.import_module(flavour.module)
    except ImportError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ProviderError(
            f"{flavour.title} cannot be imported ({reason}): pip install {flavour.package}, or -e "
            f"'.[{flavour.extra}]' in the clone"
        ) from None


def built_for(flavour: Flavour, device: tuple[int, int] | None, fp8: bool = False) -> tuple[str, ...]:
    """Returns the compute capabilities that plans built here run on, such as ("9.0",).

    TensorRT builds for the GPU it finds, TensorRT for RTX for all of its `compute_capabilities`: it compiles kernels
    when the plan is loaded.

    Args:
        device: compute capability of the GPU; None: there is no GPU.
        fp8: whether they multiply in FP8, which leaves the capabilities from `FP8_CAPABILITY` on.
    """
    built = flavour.compute_capabilities
    if device is not None and not built:
        built = (f"{device[0]}.{device[1]}",)
    return tuple(name for name in built if not fp8 or tuple(map(int, name.split("."))) >= FP8_CAPABILITY)


# Reasons why a header is refused and their cures, by the names of EngineInvalidityDiagnostics.
REFUSALS = {
    "VERSION_MISMATCH": "it was built by another version: build it again",
    "UNSUPPORTED_CC": "it was built for other GPUs: build it again",
    "OLD_CUDA_DRIVER": "the GPU's driver is too old for it: update the driver",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it: update CUDA",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory for it",
    "CUDA_ERROR": "CUDA failed: is the driver that of this GPU?",
}
DAMAGED = "MALFORMED_ENGINE"


def check_header(
    flavour: Flavour, library: ModuleType, runtime: Any, data: mmap.mmap | bytes, path: str, errors: Sequence[str]
) -> None:
    """Checks a plan's header before it is loaded, if the flavour can.

    Logs a warning if a plan built here would be faster.

    Args:
        runtime: the library's `Runtime`.
        data: the plan; only its header is read.
        path: its name in messages.
        errors: the errors that the library has logged, oldest first.

    Raises:
        ProviderError: it cannot run on this machine; says why.
        BundleError: it is not a plan, or its header is damaged.
    """
    if not flavour.reads_headers:
        return
    validity, bits = runtime.get_engine_validity(data[: runtime.engine_header_size])
    if validity == library.EngineValidity.SUBOPTIMAL:
        logger.warning("plan '%s' was built for other GPUs too: built on this one, it may be faster", path)
    if validity != library.EngineValidity.INVALID:
        return
    diagnostics = {name for name, flag in library.EngineInvalidityDiagnostics.__members__.items() if bits & int(flag)}
    kind: type[TideError] = BundleError if DAMAGED in diagnostics else ProviderError
    reasons = ["it is no plan, or a damaged one"] if DAMAGED in diagnostics else []
    reasons += [reason for name, reason in REFUSALS.items() if name in diagnostics]
    raise kind(
        f"{flavour.title} cannot run plan '{path}': " + ("; ".join(reasons or errors[-1:]) or "it does not say why")
    )


def kernel_cache(flavour: Flavour, version: str, gpu: int = 0) -> KernelCache | None:
    """Opens the cache of kernels that TensorRT for RTX compiles, one file per version and GPU.

    None: the flavour compiles no kernels when it loads plans, or the user has no home folder.
    """
    if flavour is not TENSORRT_RTX:
        return None
    try:
        return KernelCache(user_cache() / f"{flavour.name}-{version}-{device_name(gpu)}.kernels")
    except RuntimeError:
        return None


def capturable(flavour: Flavour, context: Any, stream: int) -> bool:
    """Whether a context's next run can be recorded in a CUDA graph; its shapes and addresses must be set."""
    return flavour is not TENSORRT_RTX or bool(context.is_stream_capturable(stream))


def configure(flavour: Flavour, library: ModuleType, plan: Any, cache: KernelCache | None = None) -> Any:
    """Configures execution contexts: the caller allocates the workspace and records CUDA graphs.

    By default TensorRT for RTX records graphs itself, and specializes kernels while generic ones are in use. A graph
    recorded before that would keep the generic kernels, so they are specialized first.
    """
    config = plan.create_runtime_config()
    config.set_execution_context_allocation_strategy(library.ExecutionContextAllocationStrategy.USER_MANAGED)
    if flavour is TENSORRT_RTX:
        config.cuda_graph_strategy = library.CudaGraphStrategy.DISABLED
        eager = library.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = eager
    if cache is not None:
        cache.attach(config)
    return config
