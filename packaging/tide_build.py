"""Builds the native library `libtide.so`: the runtime, its C interface and the operators for ONNX Runtime.

This is the package's build backend too: setuptools', which asks for a C++ compiler from PyPI (`ziglang`) where the
machine has none, or where TIDE_WHEEL names another machine to compile for. Nothing but a C++17 compiler is needed:
cpp/ declares what it calls of ONNX Runtime and CUDA, and opens these libraries when it runs.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  what a backend has to offer

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = ("c++", "g++", "clang++")
ZIG = "ziglang>=0.15,<0.18"
# By the value of TIDE_WHEEL: zig's target, and the platform tag of its glibc.
WHEELS = {
    "x86_64": ("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "aarch64": ("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
}
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-g0")
RUNTIME_FLAGS, OPERATOR_FLAGS = ("-O2", "-DNDEBUG"), ("-O3", "-ffp-contract=fast")
WITH_TENSORRT = {"flavours.cpp", "kernel_cache.cpp", "trt_networks.cpp"}
WITHOUT_TENSORRT = {"no_tensorrt.cpp"}
NO_COMPILER = (
    "tide_export needs a C++17 compiler: install g++ or clang, or let pip install ziglang (it does where an index "
    "can be reached and --no-build-isolation is not given)"
)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler_package()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler_package()]


def _compiler_package() -> list[str]:
    return [ZIG] if "TIDE_WHEEL" in os.environ or installed_compiler() is None else []


def installed_compiler() -> list[str] | None:
    """Returns the command of the machine's own C++ compiler: that of CXX, or the first that is there."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    return next(([path] for name in COMPILERS if (path := shutil.which(name))), None)


def compiler() -> list[str]:
    """Returns the command that compiles. Raises SystemExit: there is none."""
    wheel = os.environ.get("TIDE_WHEEL")
    own = installed_compiler()
    if wheel is None and own is not None:
        return own
    if find_spec("ziglang") is None:
        raise SystemExit(NO_COMPILER)
    zig = [sys.executable, "-m", "ziglang", "c++"]
    return zig if wheel is None else [*zig, "-target", wheel_of(wheel)[0]]


def wheel_of(machine: str) -> tuple[str, str]:
    """Returns zig's target and the platform tag of a wheel. Raises SystemExit: there is none for the machine."""
    if machine not in WHEELS:
        raise SystemExit(f"TIDE_WHEEL must be one of {', '.join(WHEELS)}, not {machine!r}")
    return WHEELS[machine]


def sources() -> tuple[list[Path], list[Path]]:
    """Returns those of the runtime, and those of the operators."""
    left_out = WITHOUT_TENSORRT if os.environ.get("TENSORRT_ROOT") else WITH_TENSORRT
    runtime = sorted(path for path in (ROOT / "cpp" / "src").rglob("*.cpp") if path.name not in left_out)
    return runtime, sorted((ROOT / "cpp" / "ops").glob("*.cpp"))


def depends() -> list[Path]:
    """Returns all files that the library is made of."""
    files = [*(ROOT / "cpp").rglob("*"), *(ROOT / "plugins").rglob("*.h")]
    return sorted(path for path in files if path.suffix in (".cpp", ".h", ".inc"))


def build(target: Path, folder: Path, version: str) -> None:
    """Compiles the library, on all cores: the runtime's sources as one, which read their headers once.

    Args:
        target: the library's file.
        folder: for what lies between.

    Raises:
        SystemExit: there is no compiler, or it refuses a source.
    """
    command, (runtime, operators) = compiler(), sources()
    folder.mkdir(parents=True, exist_ok=True)
    unity = folder / "runtime.cpp"
    unity.write_text("".join(f'#include "{path}"\n' for path in runtime))
    flags = [*FLAGS, f'-DTIDE_EXPORT_VERSION="{version}"']
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp' / 'src'}"]
    if root := os.environ.get("TENSORRT_ROOT"):
        includes += ["-isystem", f"{root}/include", "-isystem", f"{cuda_home()}/include"]
    commands = [
        [*command, *flags, *RUNTIME_FLAGS, *_more_flags(), *includes, "-c", str(unity), "-o", str(folder / "runtime.o")]
    ]
    for source in operators:
        object_file = str(folder / f"{source.stem}.o")
        commands.append([*command, *flags, *OPERATOR_FLAGS, *_more_flags(), "-c", str(source), "-o", object_file])
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        list(executor.map(_run, commands))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    _run([*command, "-shared", "-o", str(part), *(one[-1] for one in commands), *_link_flags(command)])
    part.replace(target)


def _more_flags() -> list[str]:
    """Returns those of TIDE_CXXFLAGS, for a development build: sanitizers, symbols, less optimization."""
    return shlex.split(os.environ.get("TIDE_CXXFLAGS", ""))


def _link_flags(command: Sequence[str]) -> list[str]:
    flags = [*_more_flags(), "-ldl", "-lpthread"]
    if sys.platform == "linux":
        flags += [f"-Wl,--version-script={ROOT / 'cpp' / 'src' / 'capi' / 'exports.map'}"]
        if "ziglang" not in command:  # zig links its own C++ library statically
            flags += ["-static-libstdc++", "-static-libgcc"]
    return [*flags, "-s"] if not _more_flags() else flags


def cuda_home() -> str:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stderr[-4000:]}")
