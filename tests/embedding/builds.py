"""Builds the C++ runtime with CMake, as the author of a service does, installs it, and builds programs on that."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from native_builds import ROOT, Builds
from store import locked

from tide_export.runtime.native import onnxruntime_library

# Of all that a build could be, the one that is compiled soonest: little is optimized, and one unit reads the headers
# once, for which the compiler need not collect garbage.
FAST = "-Og --param ggc-min-expand=1000 --param ggc-min-heapsize=1000000"
FLAGS = ("-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={FAST}")
UNITY = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0", "-DTIDE_OPERATOR_OPTIONS=-Og")


class Embedding:
    """Built once for all workers, and kept: `prefix`, where the runtime is installed, and programs on it: `program`,
    which is cpp/examples/tide_generate, and those of CMakeLists.txt here, of which `service` is in C."""

    def __init__(self) -> None:
        if shutil.which("cmake") is None:
            pytest.fail("there is no cmake")
        self._builds = Builds()
        self.prefix = self._builds.folder / "prefix"
        with self._locked():
            build = self._builds.make("runtime", ["--preset", "runtime", *FLAGS, *UNITY])
            with self._builds.building("prefix") as run:
                run(["cmake", "--install", str(build), "--prefix", str(self.prefix)])
            for installed in (self.prefix / "include").rglob("*.h"):  # perhaps of an older version
                if not (ROOT / "cpp" / "include" / installed.relative_to(self.prefix / "include")).is_file():
                    installed.unlink()
            programs = self._build(ROOT / "tests" / "embedding", "programs")
        self.program, self.service = build / "cpp" / "tide_generate", programs / "tide_service"
        self.memory, self.callbacks, self.rules = (programs / f"tide_{n}" for n in ("memory", "callbacks", "rules"))

    def build(self, project: Path) -> Path:
        """Builds a project that links what was installed; returns the folder."""
        with self._locked():
            return self._build(project, project.name)

    def _build(self, project: Path, name: str) -> Path:
        return self._builds.make(name, ["-S", str(project), f"-DCMAKE_PREFIX_PATH={self.prefix}", *FLAGS])

    def _locked(self):
        return locked(self._builds.folder / "embedding")


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
