"""NVIDIA's own TensorRT 11 on a machine without a GPU, put together from the wheels that the package index has.

The index has no wheel of the whole library, but of the lean one, which has the runtime and the registry of plugins and
no builder, and of the whole Python package, which asks for nine functions of the whole library and of the parser. The
lean one has three of these. A library with the six others, which give null, stands in for what is missing.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_builds import ROOT, Builds

PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
# The version that all is written for, and the newest that the index lists and pyproject.toml accepts.
VERSIONS = (PINS["tensorrt"], "11.4.0.106")
WHEELS = ("tensorrt-lean-cu13-libs", "tensorrt-cu13-bindings")
LEAN = "libnvinfer_lean.so.11"
ABSENT = """
void* createInferBuilder_INTERNAL(void) { return 0; }
void* getBuilderPluginRegistry(void) { return 0; }
int initLibNvInferPlugins(void) { return 0; }
void* createNvOnnxParser_INTERNAL(void) { return 0; }
void* createNvOnnxParserRefitter_INTERNAL(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
"""
# pip's, which keeps downloads from one run of the tests to the next. Named now, as the tests get a user's cache of
# their own before they run.
PIP_CACHE = os.environ.get("PIP_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pip"


@dataclass(frozen=True)
class RealTensorRT:
    """TensorRT of a version: `folder` is for Python's path, `lean` is the library."""

    version: str
    folder: Path

    @property
    def lean(self) -> Path:
        return self.folder / "tensorrt_bindings" / LEAN

    def python(self, code: str, *arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Runs code that imports `tensorrt`, in a process of its own: a crash is not the end of the tests."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(self.folder), str(ROOT)))} | variables
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def real_tensorrt(version: str) -> RealTensorRT:
    """Puts it together, once for all tests; skips where its wheels or a C compiler are absent."""
    folder = Builds().once(f"tensorrt-{version}", [Path(__file__)], lambda folder: _put_together(folder, version))
    return RealTensorRT(version, folder)


def _put_together(folder: Path, version: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    for wheel in _download(folder / "wheels", version):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("tensorrt_bindings/") or Path(name).name == LEAN:
                    archive.extract(name, folder)
    shutil.rmtree(folder / "wheels")
    # The Python package looks for libraries beside itself before it looks anywhere else.
    package = folder / "tensorrt_bindings"
    (folder / "tensorrt_lean_libs" / LEAN).rename(package / LEAN)
    (folder / "absent.c").write_text(ABSENT)
    for name, options in (
        ("libnvinfer.so.11", ["-Wl,--no-as-needed", str(package / LEAN), "-Wl,-rpath,$ORIGIN"]),
        ("libnvinfer_plugin.so.11", []),
        ("libnvonnxparser.so.11", []),
    ):
        command = [compiler, "-shared", "-fPIC", "-o", str(package / name), f"-Wl,-soname,{name}"]
        subprocess.run([*command, str(folder / "absent.c"), *options], check=True)
    (folder / "tensorrt.py").write_text("from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n")


def _download(folder: Path, version: str) -> list[Path]:
    wanted = [f"{wheel}=={version}" for wheel in WHEELS]
    command = [sys.executable, "-m", "pip", "--retries", "1", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    variables = os.environ | {"PIP_CACHE_DIR": str(PIP_CACHE)}
    done = subprocess.run(
        [*command, "-d", str(folder), *wanted], env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        # As the wheel's tests have it: .ci/run sets this, so that there a failure is one.
        if "TIDE_REQUIRE_INDEX" in os.environ:
            pytest.fail(f"pip gets no {' and '.join(wanted)}: {done.stderr[-2000:]}")
        pytest.skip(f"pip gets no {' and '.join(wanted)}")
    return sorted(folder.glob("*.whl"))
