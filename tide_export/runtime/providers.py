"""Selects the engine that runs a bundle here: the provider given by name, or the best there is.

A provider given by name opens or is refused with the reason; "auto" takes the first of TensorRT, ONNX Runtime on CUDA
and ONNX Runtime on the CPU that the bundle holds and the machine runs, and logs why not a faster one. PyTorch is taken
only by name: how fast it is on a GPU is not known yet.
"""

import logging
import os

from tide_export.bundle.opened import Bundle
from tide_export.errors import ConfigError, ProviderError
from tide_export.runtime.branched.backend import BranchedBackend
from tide_export.runtime.onnxruntime.bindings import check_threads
from tide_export.runtime.onnxruntime.segments import open_segments
from tide_export.runtime.onnxruntime.session import open_session
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.sequence import Backend
from tide_export.runtime.tensorrt.engines import open_engines
from tide_export.runtime.tensorrt.flavours import FLAVOURS
from tide_export.runtime.tensorrt.gpu import compute_capability
from tide_export.runtime.tensorrt.plugins import NONE
from tide_export.values import whole_number

logger = logging.getLogger("tide_export")

MAX_DEVICE = 1023
NAME_A_GPU = "device is the number of a GPU: name a provider that runs on one"
PROVIDERS = ("auto", "cpu", "cuda", "torch", *FLAVOURS)


def open_provider(
    bundle: Bundle,
    provider: str = "auto",
    threads: int | None = None,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
) -> Backend:
    """Opens `bundle` on an engine; arguments as of `engine.load`.

    Raises:
        ProviderError: the provider is unknown, or cannot run this bundle here; or plugins are given for a bundle or a
            provider without any, threads for one that is not the CPU, or a device for one that is no GPU's.
        ConfigError: threads not in 1..1024, or a device not in 0..1023.
        BundleError: the bundle is damaged.
    """
    if provider not in PROVIDERS:
        raise ProviderError(f"provider must be one of {', '.join(PROVIDERS)}, not {provider!r}")
    check_threads(threads)
    engines = bundle.manifest.engines
    if plugins not in (None, NONE) and (engines is None or engines.plugins is None):
        raise ProviderError(f"no engine of bundle '{bundle.path}' holds plugins: omit --plugins")
    if plugins not in (None, NONE) and provider in ("cpu", "cuda", "torch"):
        raise ProviderError(f"provider {provider!r} runs no engine that could hold plugins: omit --plugins")
    if threads is not None and provider not in ("auto", "cpu", "torch"):
        raise ProviderError(f"threads are for the CPU, and provider {provider!r} runs on the GPU: omit --threads")
    if device is not None:
        whole_number("device", device, 0, MAX_DEVICE, ConfigError)
        if provider in ("auto", "cpu"):
            raise ProviderError(NAME_A_GPU)
    if provider != "auto":
        return _open(bundle, provider, threads, plugins, device)
    refused = []
    for candidate in _candidates(bundle):
        try:
            return _open(bundle, candidate, threads, plugins)
        except ProviderError as error:
            refused.append(f"{candidate}: {error}")
            logger.info("not running on %s", refused[-1])
    return _open(bundle, "cpu", threads, plugins)


def _candidates(bundle: Bundle) -> list[str]:
    """The bundle's providers that are faster than the CPU, fastest first."""
    candidates = [] if bundle.manifest.engines is None else [bundle.manifest.engines.flavour]
    if bundle.manifest.networks is not None and compute_capability() is not None:
        candidates.append("cuda")
    return candidates


def _open(
    bundle: Bundle,
    provider: str,
    threads: int | None,
    plugins: str | os.PathLike[str] | None,
    device: int | None = None,
) -> Backend:
    if provider == "cpu":
        return BranchedBackend(bundle, open_session(bundle, threads), threads)
    if provider == "cuda":
        backend, title = open_segments(bundle, "cuda", gpu=device or 0), "ONNX Runtime on CUDA"
    elif provider == "torch":
        backend, title = _open_torch(bundle, threads, device), "PyTorch"
    else:
        backend, title = open_engines(bundle, provider, plugins, device or 0), FLAVOURS[provider].title
    logger.info("running '%s' with %s", bundle.path, title)
    return backend


def _open_torch(bundle: Bundle, threads: int | None, device: int | None) -> SegmentBackend:
    try:
        from tide_export.runtime.pytorch.segments import open_torch
    except ImportError as error:
        raise ProviderError(
            f"provider 'torch' needs the packages torch and onnx ({error}): pip install tide_export[torch]"
        ) from None
    return open_torch(bundle, threads=threads, gpu=device)
