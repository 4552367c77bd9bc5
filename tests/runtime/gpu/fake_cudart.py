"""Compiles and controls the stand-in for the CUDA runtime (fake_cudart.cpp), which the library opens."""

import ctypes
import fcntl
import subprocess
import sys
from collections.abc import Callable
from ctypes import c_bool, c_char, c_char_p, c_int, c_long, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tide_export.errors import GenerationError

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_suffix(".cpp")
WORK_FAILED = 719  # cudaErrorLaunchFailure
MEMORY = 1 << 30
OLD = 12040  # a version of CUDA whose graphs choose nothing: the host decides how deep a step goes
ALIGNMENT = 256  # of the tensors' addresses, which TensorRT requires

FIBRES = ROOT / "tests" / "plugins" / "fibres"
EMULATED = ("-DTIDE_EMULATED", f"-I{FIBRES / 'include'}", f"-I{FIBRES}", f"-I{ROOT / 'plugins'}")
EMULATED += (str(FIBRES / "fibres.cpp"), str(FIBRES / "launches.cpp"))

Work = ctypes.CFUNCTYPE(c_int, c_void_p)


def compiled(source: Path, library: Path, *options: str) -> Path:
    """Compiles a stand-in, once for all workers."""
    sys.path.append(str(ROOT / "packaging"))
    from tide_build import installed_compiler

    command = installed_compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        needed = [source, *source.parent.glob("*.h"), *(ROOT / "plugins").rglob("*.[ch]*")]
        changed = max(file.stat().st_mtime for file in needed)
        if not library.is_file() or library.stat().st_mtime < changed:
            flags = ("-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'cpp' / 'src'}")
            subprocess.run([*command, *flags, str(source), *options, "-o", str(library)], check=True)
    return library


def compiled_exit(folder: Path) -> Path:
    """Compiles the kernel of checkpoints for the host."""
    return compiled(SOURCE.with_name("fake_exit.cpp"), folder / "fake_exit.so", *EMULATED)


class Variable:
    """A variable of fake_cudart.cpp."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"fake_cuda_{name}"

    def __get__(self, cudart: "FakeCudart", owner: type) -> Any:
        return self._kind.in_dll(cudart.functions, self._name).value

    def __set__(self, cudart: "FakeCudart", value: Any) -> None:
        self._kind.in_dll(cudart.functions, self._name).value = value


class FakeCudart:
    """The stand-in."""

    devices, only, capability = Variable(c_int), Variable(c_int), Variable(c_int)
    driver, runtime = Variable(c_int), Variable(c_int)
    limit, allocated, downloaded = Variable(c_size_t), Variable(c_size_t), Variable(c_size_t)
    countdown, objects = Variable(c_long), Variable(c_long)
    chosen, skipped = Variable(c_long), Variable(c_long)
    failing, error = Variable(c_char * 64), Variable(c_char * 256)

    def __init__(self, library: Path) -> None:
        self.functions = functions = ctypes.CDLL(str(library))
        functions.fake_cuda_queue.argtypes = (c_void_p, Work, c_void_p)
        functions.fake_cuda_holds.argtypes, functions.fake_cuda_holds.restype = (c_void_p, c_size_t), c_bool
        functions.fake_cuda_calls.argtypes, functions.fake_cuda_calls.restype = (c_char_p,), c_long
        self.kept: list[Any] = []  # queued, or recorded

    def reset(self, devices: int = 1) -> None:
        """A machine with so many GPUs, on which nothing fails."""
        self.devices, self.only, self.capability = devices, -1, 89
        self.driver = self.runtime = 13000
        self.limit, self.countdown, self.failing = MEMORY, 0, b""

    def calls(self, function: str = "") -> int:
        """How often the library called a function of CUDA; without a name: all of those that may fail."""
        return self.functions.fake_cuda_calls(function.encode())

    def queue(self, stream: int, work: Callable[[], object]) -> None:
        """Queues `work` as a kernel is; what it raises is the error with which the stream is waited for."""

        def run(_: int | None) -> int:
            try:
                work()
                return 0
            except Exception as error:
                self.error = str(error).encode()[:255]
                return WORK_FAILED

        self.kept.append(Work(run))
        if self.functions.fake_cuda_queue(stream, self.kept[-1], None):
            raise GenerationError("the stream is another GPU's")

    def check(self, address: int, size: int) -> None:
        """Raises GenerationError unless this is memory of the GPU, aligned as engines require."""
        if address % ALIGNMENT or not self.functions.fake_cuda_holds(address, size):
            raise GenerationError(f"{size} bytes at {address:#x} are outside what is allocated, or not aligned")
