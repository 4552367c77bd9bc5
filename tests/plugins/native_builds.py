"""Builds the native parts for the tests; what cannot be built here skips with a reason."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIRED = os.environ.get("TIDE_REQUIRE_NVCC") == "1"  # CI: a missing compiler fails instead of skipping
KERNELS_EMULATED = "tide_kernels_emulated"
DECLARED = Path(__file__).parent / "declared"  # the little of TensorRT's headers that the plugins use


def need(condition: bool, reason: str) -> None:
    if not condition:
        if REQUIRED:
            pytest.fail(f"TIDE_REQUIRE_NVCC is set, but {reason}")
        pytest.skip(reason)


def cuda_headers() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [Path(home) / "include" for home in homes if home and (Path(home) / "include" / "cuda_fp16.h").is_file()]
    return str(found[0]) if found else None


def tensorrt_root() -> str:
    """The folder with TensorRT's headers: TENSORRT_ROOT, or `DECLARED` where it has none."""
    root = os.environ.get("TENSORRT_ROOT")
    return root if root and (Path(root) / "include" / "NvInfer.h").is_file() else str(DECLARED)


class Builds:
    """Presets built under one folder; the configure step's output is kept beside each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, preset: str, target: str, *options: str) -> Path:
        """Builds `target` of `preset`, incrementally; returns the build folder."""
        build = self.folder / preset
        with (self.folder / f"{preset}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            given = [f"-DTENSORRT_ROOT={tensorrt_root()}", "-DTIDE_WARNINGS_AS_ERRORS=ON", *options]
            log = run(["cmake", "--preset", preset, "-B", str(build), *given])
            (self.folder / f"{preset}.log").write_text(log)
            run(["cmake", "--build", str(build), "--target", target, "--parallel", "2"])
        return build

    def once(self, contents: str, make: Callable[[Path], None]) -> Path:
        """The folder that `make` filled, by whichever worker first asked for what is made of these contents."""
        folder = self.folder / hashlib.sha256(contents.encode()).hexdigest()
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                (folder / "done").touch()
        return folder

    def kernels(self) -> Path:
        """Builds the kernels and the plugins with nvcc.

        Optimized less than for users, and for one architecture without clusters and one with them, unless a GPU will
        run it: a sixth of the time.
        """
        quick = ["-DCMAKE_CUDA_FLAGS=-Xcicc -O1 -Xptxas -O1", "-DCUDA_ARCHITECTURES=75-real,90-real"]
        quick = [] if shutil.which("nvidia-smi") else quick
        return self.make("plugins", "all", *quick)

    def emulated(self, target: str, preset: str = "emulated") -> Path:
        """Builds `target` for the CPU, with `preset` "sanitized" for an address sanitizer; returns its folder."""
        return self.make(preset, target) / "plugins" / "emulated"


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
