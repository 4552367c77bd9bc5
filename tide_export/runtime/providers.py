"""Opens the engine that runs a bundle here: the provider given by name, or the best there is.

A provider given by name opens or is refused with the reason; "auto" takes the first of TensorRT, ONNX Runtime on CUDA
and ONNX Runtime on the CPU that the bundle holds and the machine runs, and logs why not a faster one. The library opens
all but TensorRT's plans, whose runs it is given (`tensorrt.plans`).
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from tide_export.bundle.opened import Bundle
from tide_export.common.values import whole_number
from tide_export.errors import ConfigError, ProviderError
from tide_export.runtime.callers_networks import load_arguments
from tide_export.runtime.cuda_libraries import check_packages, preload_cuda
from tide_export.runtime.native import Owned, created, onnxruntime_library
from tide_export.runtime.tensorrt.flavours import FLAVOURS
from tide_export.runtime.tensorrt.gpu import compute_capability
from tide_export.runtime.tensorrt.plans import open_plans
from tide_export.runtime.tensorrt.plugins import NONE

logger = logging.getLogger("tide_export")

MAX_THREADS = 1024  # above the cores of most machines; ONNX Runtime starts all of them
MAX_DEVICE = 1023
NAME_A_GPU = "device is the number of a GPU: name a provider that runs on one"
PROVIDERS = ("auto", "cpu", "cuda", *FLAVOURS)
NETWORKS = "cpu-networks"  # the segment networks in ONNX Runtime on the CPU, for checks


def open_library_engine(
    bundle: Bundle,
    provider: str,
    threads: int | None,
    verify: bool,
    plugins: str | os.PathLike[str] | None,
    device: int | None,
    graphs: str | os.PathLike[str] | None,
    adapters: Mapping[str, str | os.PathLike[str]] | None,
) -> Owned:
    """Creates a tide_engine for `bundle`; the arguments are those of `engine.open_engine`.

    Raises:
        ProviderError: the provider is unknown or cannot run this bundle here; or plugins are given for a bundle or
            provider without plugins, threads for a GPU, or a device for the CPU.
        ConfigError: threads not in 1..1024, a device not in 0..1023, or an adapter that does not fit the bundle.
        BundleError: the bundle is damaged.
    """
    _check(bundle, provider, threads, plugins, device)
    if (
        adapters and bundle.manifest.model.lora is None
    ):  # TensorRT's plans, which the library does not open, ask nothing
        raise ConfigError(f"bundle '{bundle.path}' has no room for adapters: export it with --lora-rank")
    options: dict[str, Any] = {"threads": threads, "verify": verify, "device": device}
    options |= {"graphs": None if graphs is None else os.fspath(graphs), "onnxruntime": onnxruntime_library()}
    options["adapters"] = {name: os.fspath(folder) for name, folder in (adapters or {}).items()} or None
    if provider != "auto":
        return _open(bundle, provider, options, plugins)
    refused = []
    for candidate in _candidates(bundle):
        try:
            return _open(bundle, candidate, options | {"threads": None}, plugins)
        except ProviderError as error:
            refused.append(f"{candidate}: {error}")
            logger.info("not running on %s", refused[-1])
    return _open(bundle, "cpu", options, plugins)


def _check(
    bundle: Bundle, provider: str, threads: int | None, plugins: str | os.PathLike[str] | None, device: int | None
) -> None:
    if provider not in (*PROVIDERS, NETWORKS):
        raise ProviderError(f"provider must be one of {', '.join(PROVIDERS)}, not {provider!r}")
    if threads is not None:
        whole_number("threads", threads, 1, MAX_THREADS, ConfigError)
    plans = bundle.manifest.engines
    if plugins not in (None, NONE) and (plans is None or plans.plugins is None):
        raise ProviderError(f"no plan of bundle '{bundle.path}' holds plugins: omit --plugins")
    if plugins not in (None, NONE) and provider in ("cpu", "cuda"):
        raise ProviderError(f"provider {provider!r} runs no plan that could hold plugins: omit --plugins")
    if threads is not None and provider not in ("auto", "cpu", NETWORKS):
        raise ProviderError(f"threads are for the CPU, and provider {provider!r} runs on the GPU: omit --threads")
    if device is not None:
        whole_number("device", device, 0, MAX_DEVICE, ConfigError)
        if provider in ("auto", "cpu", NETWORKS):
            raise ProviderError(NAME_A_GPU)


def _candidates(bundle: Bundle) -> list[str]:
    """Returns the bundle's providers that are faster than the CPU, fastest first."""
    candidates = [] if bundle.manifest.engines is None else [bundle.manifest.engines.flavour]
    if bundle.manifest.has_cuda_networks and compute_capability() is not None:
        candidates.append("cuda")
    return candidates


def _open(bundle: Bundle, provider: str, options: dict[str, Any], plugins: str | os.PathLike[str] | None) -> Owned:
    if provider not in FLAVOURS and options["onnxruntime"] is None and not os.environ.get("TIDE_ONNXRUNTIME"):
        raise ProviderError(
            f"provider '{provider}' needs ONNX Runtime: pip install -e '.[cpu]' in the clone, or name its library in "
            "the environment variable TIDE_ONNXRUNTIME"
        )
    if provider == "cuda":
        check_packages()
    if provider not in ("cpu", NETWORKS):
        preload_cuda()
    load_options = {name: value for name, value in options.items() if value is not None} | {"provider": provider}
    if provider in FLAVOURS:
        handle = open_plans(bundle, provider, load_options, plugins)
    else:
        handle = created("load", *load_arguments(bundle, load_options))
    threads = "" if options["threads"] is None else f", {options['threads']} threads"
    titles = {"cuda": "ONNX Runtime on CUDA", **{name: flavour.title for name, flavour in FLAVOURS.items()}}
    logger.info("running '%s' with %s%s", bundle.path, titles.get(provider, "ONNX Runtime on the CPU"), threads)
    return handle
