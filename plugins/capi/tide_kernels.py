"""Calls `libtide_kernels` with ctypes: the argument structs of `plugins/*/kernel.cuh` and a loader.

Pointers and streams are integers (device addresses); the caller keeps the memory alive until the stream is done. In the
build for the CPU the addresses are host memory.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

VERSION = 1  # TIDE_KERNELS_VERSION in tide_kernels.h
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # TideType
NORM_NONE, NORM_RMS, NORM_LAYER = 0, 1, 2  # TideNorm


class NormArgs(ctypes.Structure):
    """`TideNormArgs`."""

    _fields_ = [
        ("kind", c_int32),
        ("epsilon", c_float),
        ("scale_offset", c_float),
        ("scale", c_void_p),
        ("shift", c_void_p),
    ]


class RouteArgs(ctypes.Structure):
    """`TideRouteArgs`."""

    _fields_ = [
        *[(name, c_int32) for name in ("states_type", "weights_type", "threshold_type", "reserved")],
        *[(name, c_int64) for name in ("rows", "hidden", "bottleneck", "shortlist", "states_stride")],
        ("threshold_stride", c_int64),
        ("norm", NormArgs),
        *[(name, c_void_p) for name in ("states", "down", "up", "bias", "shortlist_weight", "confidence")],
        *[(name, c_void_p) for name in ("threshold", "scores", "exits")],
    ]


class ExitScatterArgs(ctypes.Structure):
    """`TideExitScatterArgs`."""

    _fields_ = [
        *[(name, c_int32) for name in ("states_type", "weights_type", "layer", "checkpoint")],
        *[(name, c_int64) for name in ("rows", "hidden", "lens_rank", "states_stride", "output_rows", "output_stride")],
        ("norm", NormArgs),
        *[(name, c_void_p) for name in ("states", "lens_down", "lens_up", "lens_bias", "exits", "destination")],
        *[(name, c_void_p) for name in ("output", "exit_layers", "counts")],
    ]


class CompactArgs(ctypes.Structure):
    """`TideCompactArgs`."""

    _fields_ = [
        *[(name, c_int64) for name in ("rows", "row_bytes", "states_stride")],
        *[(name, c_void_p) for name in ("states", "exits", "staying", "leaving", "staying_rows", "leaving_rows")],
        *[(name, c_void_p) for name in ("staying_size", "leaving_size")],
    ]


class GatherPendingArgs(ctypes.Structure):
    """`TideGatherPendingArgs`."""

    _fields_ = [
        *[(name, c_int64) for name in ("batch", "tokens", "capacity", "token_bytes")],
        *[(name, c_void_p) for name in ("states", "take", "lengths", "pending", "counts", "positions")],
    ]


WITH_WORKSPACE = {"tide_route": RouteArgs, "tide_exit_scatter": ExitScatterArgs, "tide_compact": CompactArgs}


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
        for name, arguments in WITH_WORKSPACE.items():
            function, size = getattr(self.loaded, name), getattr(self.loaded, f"{name}_workspace")
            function.argtypes = [POINTER(arguments), c_void_p, c_int64, c_void_p]
            size.argtypes, size.restype = [POINTER(arguments)], c_int64
        self.loaded.tide_gather_pending.argtypes = [POINTER(GatherPendingArgs), c_void_p]
        self.loaded.tide_kernels_emulate.argtypes = [c_uint64, c_int32]

    def emulate(self, order: int = 0, compute_capability: int = 8) -> None:
        """Sets the order and compute capability of the build for the CPU; KernelError in a build for GPUs."""
        _check("tide_kernels_emulate", self.loaded.tide_kernels_emulate(order, compute_capability))

    def workspace(self, name: str, args: ctypes.Structure) -> int:
        """Bytes of workspace that `start(name, args, ...)` needs."""
        return getattr(self.loaded, f"{name}_workspace")(ctypes.byref(args))

    def start(
        self,
        name: str,
        args: ctypes.Structure,
        workspace: int | None = None,
        workspace_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        """Calls `tide_route`, `tide_exit_scatter`, `tide_compact` or `tide_gather_pending`.

        Raises:
            KernelError: the arguments are unusable (CUDA's error 1), or CUDA failed.
        """
        function = getattr(self.loaded, name)
        if name in WITH_WORKSPACE:
            status = function(ctypes.byref(args), workspace, workspace_bytes, stream)
        else:
            status = function(ctypes.byref(args), stream)
        _check(name, status)


def _check(name: str, status: int) -> None:
    if status != 0:
        raise KernelError(f"{name} gave CUDA error {status}")
