"""Calls `libtide_kernels` with ctypes: the argument structs of `plugins/*/kernel.cuh` and a loader.

Pointers and streams are integers (device addresses); the caller keeps the memory alive until the stream is done. In the
build for the CPU the addresses are host memory.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

VERSION = 3  # TIDE_KERNELS_VERSION in tide_kernels.h
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # TideType
COUNTERS = 193  # TIDE_EXIT_COUNTERS in tide_exit/kernel.cuh: uint32 numbers, 0 before the first call
NORM_NONE, NORM_RMS, NORM_LAYER = 0, 1, 2  # TideNorm


class NormArgs(ctypes.Structure):
    """`TideNormArgs`."""

    _fields_ = [
        ("kind", c_int32),
        ("epsilon", c_float),
        ("scale", c_void_p),
        ("shift", c_void_p),
    ]


class ExitArgs(ctypes.Structure):
    """`TideExitArgs`."""

    _fields_ = [
        *[(name, c_int32) for name in ("states_type", "reserved")],
        *[
            (name, c_int64)
            for name in ("slots", "tokens", "hidden", "exit_rows", "bottleneck", "shortlist", "lens_rank")
        ],
        ("norm", NormArgs),
        *[(name, c_void_p) for name in ("states", "last_tokens", "thresholds", "down", "up", "bias")],
        *[(name, c_void_p) for name in ("shortlist_weight", "confidence", "lens_down", "lens_up", "lens_bias")],
        *[(name, c_void_p) for name in ("exit_states", "scores", "exits")],
    ]


class KernelError(RuntimeError):
    """A kernel could not be started; the message holds CUDA's error number."""


class Kernels:
    """The functions of one `libtide_kernels`.

    Raises:
        OSError: there is no such library, or it cannot be loaded.
        KernelError: it is of another version than this file.
    """

    def __init__(self, path: str | Path) -> None:
        self.loaded = ctypes.CDLL(str(path))
        version = self.loaded.tide_kernels_version()
        if version != VERSION:
            raise KernelError(f"{path} is version {version} of the kernels, this file is for version {VERSION}")
        self.loaded.tide_exit.argtypes = [POINTER(ExitArgs), c_void_p, c_int64, c_void_p, c_void_p]
        self.loaded.tide_exit_workspace.argtypes = [POINTER(ExitArgs)]
        self.loaded.tide_exit_workspace.restype = c_int64
        self.loaded.tide_kernels_emulate.argtypes = [c_uint64]

    def emulate(self, order: int = 0) -> None:
        """Sets the order of the build for the CPU; KernelError in a build for GPUs."""
        _check("tide_kernels_emulate", self.loaded.tide_kernels_emulate(order))

    def exit_workspace(self, args: ExitArgs) -> int:
        """Bytes of workspace that `exit(args, ...)` needs."""
        return int(self.loaded.tide_exit_workspace(ctypes.byref(args)))

    def exit(
        self,
        args: ExitArgs,
        workspace: int | None,
        workspace_bytes: int,
        counters: int | None,
        stream: int | None = None,
    ) -> None:
        """Calls `tide_exit`.

        Raises:
            KernelError: the arguments are unusable (CUDA's error 1), or CUDA failed.
        """
        _check("tide_exit", self.loaded.tide_exit(ctypes.byref(args), workspace, workspace_bytes, counters, stream))


def _check(name: str, status: int) -> None:
    if status != 0:
        raise KernelError(f"{name} gave CUDA error {status}")
