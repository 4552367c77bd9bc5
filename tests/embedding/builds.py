"""Builds the C++ runtime with CMake, as the author of a service does, installs it, and builds programs on that."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tide_export.runtime.native import onnxruntime_library

ROOT = Path(__file__).parents[2]
# One unit reads the headers once; -Og compiles a third faster than -O1.
FLAGS = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-Og")
UNITY = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0")


class Embedding:
    """Built once for all workers: `prefix`, where the runtime is installed, and programs on it: `program`, which is
    cpp/examples/tide_generate, and those of CMakeLists.txt here, of which `service` is in C."""

    def __init__(self, folder: Path) -> None:
        self.prefix, build, programs, done = (folder / name for name in ("prefix", "build", "programs", "done"))
        self.program, self.service = build / "cpp" / "tide_generate", programs / "tide_service"
        self.memory, self.callbacks, self.rules = (programs / f"tide_{n}" for n in ("memory", "callbacks", "rules"))
        if shutil.which("cmake") is None:
            pytest.fail("there is no cmake")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.is_file():
                options = ["-DTIDE_WARNINGS_AS_ERRORS=ON", *FLAGS, *UNITY]
                run(["cmake", "--preset", "runtime", "-B", str(build), *options])
                run(["cmake", "--build", str(build), "--parallel", "2"])
                run(["cmake", "--install", str(build), "--prefix", str(self.prefix)])
                self.build(ROOT / "tests" / "embedding", programs)
                done.touch()

    def build(self, project: Path, folder: Path) -> None:
        """Builds a project that links what was installed."""
        run(["cmake", "-S", str(project), "-B", str(folder), f"-DCMAKE_PREFIX_PATH={self.prefix}", *FLAGS])
        run(["cmake", "--build", str(folder)])


def environment(**more: object) -> dict[str, str]:
    """The variables of a program that runs bundles: where ONNX Runtime's library is."""
    given = {"TIDE_ONNXRUNTIME": onnxruntime_library()} | more
    return os.environ | {name: str(value) for name, value in given.items()}


def run(command: list[str], input: str | None = None) -> str:
    done = subprocess.run(
        command, input=input, cwd=ROOT, capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
