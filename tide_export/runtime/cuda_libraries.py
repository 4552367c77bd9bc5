"""Opens CUDA's libraries where pip put them, so that ONNX Runtime and the library find them by name.

NVIDIA's packages put them into `nvidia/<package>/lib` of site-packages, where the system does not look. One that is
open already is found by its name whoever asks for it (dlopen(3)), as `onnxruntime.preload_dlls` uses too, which would
import onnxruntime.
"""

import ctypes
import logging
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tide_export.errors import ProviderError

logger = logging.getLogger("tide_export")

# In this order, because some need earlier ones. ONNX Runtime opens cuDNN only if a kernel needs it.
NAMES = ("cudart", "nvrtc", "cublasLt", "cublas", "nvJitLink", "cufft", "curand", "cudnn")
_opened: list[ctypes.CDLL] = []  # stay open


def preload_cuda() -> None:
    """Opens the libraries of NVIDIA's packages, of every version that is installed; once."""
    if _opened:
        return
    spec = find_spec("nvidia")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    for name in NAMES:
        for path in sorted(file for folder in folders for file in folder.glob(f"*/lib/lib{name}.so.*")):
            try:
                _opened.append(ctypes.CDLL(str(path)))
            except OSError as error:  # whoever needs it says what is missing
                logger.debug("%s cannot be opened: %s", path, error)


def check_packages() -> None:
    """Checks that pip has installed one build of ONNX Runtime alone.

    Raises:
        ProviderError: `onnxruntime` and `onnxruntime-gpu` are both installed, and have written the same files.
    """
    try:
        versions = [version(name) for name in ("onnxruntime", "onnxruntime-gpu")]
    except PackageNotFoundError:
        return
    raise ProviderError(
        f"onnxruntime {versions[0]} and onnxruntime-gpu {versions[1]} are both installed and overwrite each other's "
        "files: pip uninstall onnxruntime onnxruntime-gpu, then pip install -e '.[cuda]' in the clone"
    )
