"""Builds the C++ runtime for the tests: finds headers, builds and installs the library, and builds the driver on it."""

import fcntl
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from tensorrt_stubs import stubs

ROOT = Path(__file__).parents[2]
REQUIRED = os.environ.get("TIDE_REQUIRE_CPP") == "1"  # CI: missing headers fail instead of skipping
SYSTEM = (Path("/usr/include"), Path("/usr/local/include"))
SANITIZE = os.environ.get("TIDE_CPP_SANITIZE", "")  # by hand: address,undefined or thread
# One unit reads the headers once; -Og compiles a third faster than -O1.
FLAGS = ("-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={'-g' if SANITIZE else '-Og'}")
FLAGS += ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0")
# By flavour: the variable that names a folder with its include/, how its version is defined there, and its library.
HEADERS = {
    "tensorrt": ("TENSORRT_ROOT", "ENTERPRISE", "libnvinfer"),
    "tensorrt-rtx": ("TENSORRT_RTX_ROOT", "RTX", "libtensorrt_rtx"),
}


def need(condition: bool, reason: str) -> None:
    if not condition:
        if REQUIRED:
            pytest.fail(f"TIDE_REQUIRE_CPP is set, but {reason}")
        pytest.skip(reason)


def headers(cache: Path) -> list[str]:
    """CMake's options for the headers: of the environment, the system, or Debian's packages unpacked into `cache`."""
    onnxruntime, json = os.environ.get("ONNXRUNTIME_INCLUDE_DIR"), os.environ.get("NLOHMANN_JSON_INCLUDE_DIR")
    ort_folders = (at / "onnxruntime" for at in SYSTEM if (at / "onnxruntime/onnxruntime_cxx_api.h").is_file())
    onnxruntime = onnxruntime or next(map(str, ort_folders), None)
    json = json or next((str(at) for at in SYSTEM if (at / "nlohmann/json.hpp").is_file()), None)
    if onnxruntime is None or json is None:
        script = ROOT / "tools" / "onnxruntime_headers.sh"
        done = subprocess.run([script, cache], capture_output=True, text=True, check=False)
        need(done.returncode == 0, f"there are no headers of ONNX Runtime and nlohmann/json: {done.stderr.strip()}")
        onnxruntime = onnxruntime or str(cache / "usr/include/onnxruntime")
        json = json or str(cache / "usr/include")
    return [f"-DONNXRUNTIME_INCLUDE_DIR={onnxruntime}", f"-DNLOHMANN_JSON_INCLUDE_DIR={json}"]


def cuda_headers() -> str:
    """A folder with the CUDA runtime's headers, or ""."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    return next((str(at) for at in folders if (at / "cuda_runtime_api.h").is_file()), "")


def onnxruntime_library() -> Path:
    """The library that the Python runtime uses."""
    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    libraries = sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"))
    need(bool(libraries), "the installed onnxruntime has no libonnxruntime.so")
    return libraries[0]


class TensorrtBuild(NamedTuple):
    """The example program, the driver on stand-ins for CUDA and TensorRT, the folder of the latter, and its version."""

    program: Path
    driver: Path
    libraries: Path
    version: str


class CppBuild:
    """Built once for all workers: `program`, the example, `driver`, and `prefix`, where the runtime is installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.program = folder / "build" / "cpp" / "tide_generate"
        self.driver, self.prefix = folder / "driver" / "tide_driver", folder / "prefix"
        need(shutil.which("cmake") is not None, "there is no cmake")
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.driver.is_file():
                self._make(folder)

    def with_tensorrt(self, flavour: str = "tensorrt") -> "TensorrtBuild":
        """A build with the headers of a flavour."""
        variable, suffix, library = HEADERS[flavour]
        root = Path(os.environ.get(variable) or "missing")
        defines = root / "include" / "NvInferVersion.h"
        version = re.findall(rf"#define TRT_[A-Z]+_{suffix} (\d+)", defines.read_text() if defines.is_file() else "")
        if len(version) != 4:
            pytest.skip(f"{variable} has no headers of {flavour}")
        folder = self._folder / flavour
        build, driver, prefix = folder / "build", folder / "driver", folder / "prefix"
        with (self._folder / f"{flavour}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (driver / "tide_driver").is_file():
                self._build(self._folder, build, f"-DTENSORRT_ROOT={root}", "-DTIDE_WITH_TENSORRT=ON")
                run(["cmake", "--install", str(build), "--prefix", str(prefix)])
                (folder / "tensorrt_stubs.h").write_text(stubs(root / "include"))
                options = [headers(self._folder / "headers")[0], f"-DTENSORRT_HEADERS={root}/include"]
                named = f"-DTENSORRT_LIBRARY={library}.so.{version[0]}"
                self._build_driver(driver, prefix, *options, f"-DSTUBS={folder}", named)
        program = build / self.program.relative_to(self._folder / "build")
        return TensorrtBuild(program, driver / "tide_driver", driver, ".".join(version))

    def _build(self, folder: Path, build: Path, *more: str) -> None:
        library = f"-DONNXRUNTIME_LIBRARY={onnxruntime_library()}"
        options = [*headers(folder / "headers"), "-DTIDE_WARNINGS_AS_ERRORS=ON", f"-DTIDE_SANITIZE={SANITIZE}", *FLAGS]
        run(["cmake", "--preset", "runtime", "-B", str(build), library, *options, *more])
        run(["cmake", "--build", str(build)])

    def _make(self, folder: Path) -> None:
        build = folder / "build"
        self._build(folder, build)
        run(["cmake", "--install", str(build), "--prefix", str(self.prefix)])
        self._build_driver(self.driver.parent, self.prefix, headers(folder / "headers")[0])

    def _build_driver(self, build: Path, prefix: Path, *more: str) -> None:
        driver = ["-S", str(ROOT / "tests" / "cpp"), "-B", str(build), f"-DCUDA_HEADERS={cuda_headers()}"]
        run(["cmake", *driver, f"-DCMAKE_PREFIX_PATH={prefix}", *FLAGS, *more])
        run(["cmake", "--build", str(build)])


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
