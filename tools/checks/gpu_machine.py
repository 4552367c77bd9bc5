"""What the machine of a `gpu_session` has: facts for the report, and for each step a sentence on what it lacks."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # on a bare machine the package is not installed

from tide_export.runtime.tensorrt.flavours import FLAVOURS, built_for  # noqa: E402
from tide_export.runtime.tensorrt.gpu import compute_capability  # noqa: E402

Lacks = Callable[[], str | None]
PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "cuda-bindings", "tensorrt", "tensorrt-rtx")
QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def facts() -> dict[str, str]:
    """The machine in words."""
    found = {"date": time.strftime("%Y-%m-%d"), "gpu": "none", "cpu": f"{os.cpu_count()} cores, {platform.machine()}"}
    capability = compute_capability()
    if capability is not None:
        found["gpu"] = f"compute capability {capability[0]}.{capability[1]}"
        if shutil.which("nvidia-smi"):
            done = subprocess.run(QUERY, capture_output=True, text=True, check=False)
            found["gpu"] = f"{done.stdout.strip()}, {found['gpu']}"
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "versions": ", ".join(versions)}


def gpu() -> str | None:
    return None if compute_capability() is not None else "no GPU here"


def program(name: str) -> Lacks:
    return lambda: None if shutil.which(name) else f"no {name} here"


def package(name: str) -> Lacks:
    return lambda: None if importlib.util.find_spec(name) else f"the package {name} is not installed"


def headers(variable: str) -> Lacks:
    def lacks() -> str | None:
        root = os.environ.get(variable)
        found = root and (Path(root) / "include" / "NvInfer.h").is_file()
        return None if found else f"{variable} names no folder with include/NvInfer.h"

    return lacks


def flavour(name: str) -> Lacks:
    """For plans of this flavour, on this GPU."""

    def lacks() -> str | None:
        one, device = FLAVOURS[name], compute_capability()
        missing = gpu() or package(one.module)() or package("polygraphy")()
        if missing is not None or device is None:
            return missing
        capability = f"{device[0]}.{device[1]}"
        if capability not in built_for(one, device):
            return f"{one.title} runs on no GPU of compute capability {capability}"
        return asked(f"import {one.module}")

    return lacks


def torch_on_gpu() -> str | None:
    """PyTorch that uses this GPU."""
    return (
        package("torch")()
        or gpu()
        or asked(
            "import torch, sys",
            "sys.exit(0 if torch.cuda.is_available() else 'torch ' + torch.__version__ + ' uses no GPU')",
        )
    )


def onnxruntime_on_gpu() -> str | None:
    """ONNX Runtime with its provider for CUDA."""
    return (
        package("onnxruntime")()
        or asked(
            "import onnxruntime as o, sys",
            "has = 'CUDAExecutionProvider' in o.get_available_providers()",
            "sys.exit(0 if has else 'onnxruntime ' + o.__version__ + ' here is the build for the CPU')",
        )
        or gpu()
    )


@functools.cache
def asked(*lines: str) -> str | None:
    """Runs Python in a process of its own; None if that succeeds, else its last words."""
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    words = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else words[-1] if words else f"exit code {done.returncode}"


def libraries(module: str) -> str:
    """LD_LIBRARY_PATH with a package of libraries."""
    spec = importlib.util.find_spec(module)
    folder = str(Path(spec.origin).parent) if spec is not None and spec.origin else ""
    return ":".join(path for path in (folder, os.environ.get("LD_LIBRARY_PATH", "")) if path)
