"""Builds of the native parts, each made once for all workers; what cannot be built here skips with a reason."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
REQUIRED = os.environ.get("TIDE_REQUIRE_NVCC") == "1"  # in CI nothing is skipped for want of a compiler


def need(condition: bool, reason: str) -> None:
    if not condition:
        if REQUIRED:
            pytest.fail(f"TIDE_REQUIRE_NVCC is set, but {reason}")
        pytest.skip(reason)


def cuda_headers() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [Path(home) / "include" for home in homes if home and (Path(home) / "include" / "cuda_fp16.h").is_file()]
    return str(found[0]) if found else None


def tensorrt_root() -> str | None:
    root = os.environ.get("TENSORRT_ROOT")
    return root if root and (Path(root) / "include" / "NvInfer.h").is_file() else None


class Builds:
    """Presets built under one folder; the configure step's output is kept beside each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, preset: str, target: str, *options: str) -> Path:
        """The folder in which `target` of `preset` was built."""
        build, name = self.folder / preset, f"{preset}-{target}"
        with (self.folder / f"{preset}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.folder / f"{name}.done").exists():
                root = tensorrt_root()
                given = [f"-DTENSORRT_ROOT={root or ''}", "-DTIDE_WARNINGS_AS_ERRORS=ON", *options]
                log = run(["cmake", "--preset", preset, "-B", str(build), *given])
                (self.folder / f"{preset}.log").write_text(log)
                run(["cmake", "--build", str(build), "--target", target, "--parallel", "2"])
                (self.folder / f"{name}.done").touch()
        return build


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Builds:
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    folder = shared / "native"
    folder.mkdir(exist_ok=True)
    return Builds(folder)


@pytest.fixture(scope="session")
def emulated_library(builds: Builds) -> Path:
    """libtide_kernels_emulated.so."""
    need(shutil.which("cmake") is not None, "there is no cmake")
    need(cuda_headers() is not None, "there are no CUDA headers")
    build = builds.make("emulated", "tide_kernels_emulated", f"-DCUDA_HEADERS={cuda_headers()}")
    return build / "plugins" / "emulated" / "libtide_kernels_emulated.so"


@pytest.fixture(scope="session")
def emulated_plugins(builds: Builds, emulated_library: Path) -> Path:
    """libtide_plugins_emulated.so."""
    if tensorrt_root() is None:
        pytest.skip("TENSORRT_ROOT has no TensorRT headers")
    builds.make("emulated", "tide_plugins_emulated", f"-DCUDA_HEADERS={cuda_headers()}")
    return emulated_library.with_name("libtide_plugins_emulated.so")


@pytest.fixture(scope="session")
def kernel_build(builds: Builds) -> Path:
    """The folder with libtide_kernels.so, and libtide_plugins.so where there are TensorRT headers."""
    need(shutil.which("cmake") is not None, "there is no cmake")
    need(shutil.which("nvcc") is not None, "there is no nvcc")
    return builds.make("plugins", "all") / "plugins"
