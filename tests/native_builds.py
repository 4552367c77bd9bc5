"""Builds the native parts for the tests, in the store (store.py); what cannot be built here skips with a reason."""

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from store import locked, store

sys.path.append(str(Path(__file__).parents[1] / "packaging"))

import tide_build

ROOT = Path(__file__).parents[1]
REQUIRED = os.environ.get("TIDE_REQUIRE_NVCC") == "1"  # CI: a missing compiler fails instead of skipping
DECLARED = ROOT / "tests" / "plugins" / "declared"  # the little of TensorRT's headers that the plugins use
QUICK_ARCHITECTURES = (75, 90)  # the oldest GPUs, and those that are lent

Run = Callable[[Sequence[str]], None]


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


class BuildFailed(Exception):
    """A command of a build failed: the command, and the end of what it wrote."""


class Builds:
    """Folders below one of the store, each of which one process builds at a time.

    CMake and make decide what is out of date, and are always asked. What they cannot go on from is built from nothing.
    """

    def __init__(self) -> None:
        checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]  # CMake's folders belong to one
        self.folder = store() / "native" / checkout

    def make(self, name: str, options: Sequence[str], target: str = "all") -> Path:
        """Builds `target` of a project in the folder `name`; `options` are cmake's, and say which project it is."""
        folder = self.folder / name
        with self.building(name) as run:
            configure = ["cmake", *options, "-B", str(folder), "-DTIDE_WARNINGS_AS_ERRORS=ON"]
            try:
                run(configure)
            except BuildFailed:  # perhaps another version of CMake, or another checkout, was here
                shutil.rmtree(folder, ignore_errors=True)
                run(configure)
            run(["cmake", "--build", str(folder), "--target", target, "--parallel", "2"])
        return folder

    @contextlib.contextmanager
    def building(self, name: str) -> Iterator[Run]:
        """What runs the commands of a build, whose output is added to `name`.log.

        If a process was killed that built in this folder, the folder is removed.
        """
        folder, begun, log = (self.folder / f"{name}{suffix}" for suffix in ("", ".begun", ".log"))
        with locked(folder) as lock:
            if begun.exists() or not (folder.exists() and log.exists()):
                shutil.rmtree(folder, ignore_errors=True)
                log.unlink(missing_ok=True)
            begun.touch()

            def run(command: Sequence[str]) -> None:
                with log.open("ab") as output:
                    start = output.tell()
                    # A compiler that outlives a killed process holds the lock until it has ended too.
                    options = {"stdout": output, "stderr": subprocess.STDOUT, "pass_fds": (lock,), "check": False}
                    done = subprocess.run(command, cwd=ROOT, **options)
                if done.returncode != 0:
                    said = log.read_bytes()[start:].decode(errors="replace")
                    raise BuildFailed(f"{' '.join(command)}\n{said[-8000:]}")

            try:
                yield run
            finally:
                begun.unlink()

    def once(self, name: str, depends: Iterable[str | Path], make: Callable[[Path], None]) -> Path:
        """The folder `name`, filled by `make`: anew where one of the texts or files that it depends on has changed."""
        key = hashlib.sha256()
        for one in depends:
            key.update(one.read_bytes() if isinstance(one, Path) else one.encode())
        folder, made = self.folder / name, self.folder / name / "made"
        with locked(folder):
            if not made.is_file() or made.read_text() != key.hexdigest():
                for left in [folder, *self.folder.glob(f"{name}.part*")]:
                    shutil.rmtree(left, ignore_errors=True)
                part = Path(tempfile.mkdtemp(prefix=f"{name}.part", dir=self.folder))  # which no killed compiler knows
                make(part)
                (part / "made").write_text(key.hexdigest())
                part.rename(folder)
        return folder

    def plugins(self, preset: str, target: str, *options: str) -> Path:
        """Builds `target` of plugins/ by a preset of CMake; returns the folder of its files."""
        given = ["--preset", preset, f"-DTENSORRT_ROOT={tensorrt_root()}", *options]
        return self.make(preset, given, target) / "plugins"

    def operators(self) -> Path:
        """Builds the operators for ONNX Runtime as the package's, with what tests call of their kernels."""
        flags = [*tide_build.OPERATOR_FLAGS, *tide_build.FLAGS, *shlex.split(os.environ.get("TIDE_CXXFLAGS", ""))]
        options = ["-S", str(ROOT / "tests" / "operators"), f"-DTIDE_FLAGS={';'.join(flags)}"]
        return self.make("operators", options) / "libtide_test_operators.so"

    def kernels(self) -> Path:
        """Builds the kernels and the plugins with nvcc, as for users but for few GPUs; returns the folder.

        nvcc leaves its PTX there, and what it says of the kernels in the build's log.
        """
        architectures = {f"{one}-real" for one in QUICK_ARCHITECTURES}
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
            architectures |= {f"{one.replace('.', '')}-real" for one in found if one.replace(".", "").isdigit()}
        chosen = f"-DCUDA_ARCHITECTURES={','.join(sorted(architectures))}"
        return self.plugins("plugins", "all", chosen, "-DCMAKE_CUDA_FLAGS=-Xptxas -v --keep")
