"""Records work into the body of a switch node of a CUDA graph, where it is if the GPU decides a step's depth."""

import contextlib
import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_int, c_longlong, c_size_t, c_uint, c_ulonglong, c_void_p

NAMES = ("libcudart.so.13", "libcudart.so.12")
ASSIGN_DEFAULT, IN_THREAD = 1, 1  # cudaGraphCondAssignDefault, cudaStreamCaptureModeThreadLocal


class SwitchNode(ctypes.Structure):
    """`cudaGraphNodeParams` of a conditional node (cpp/src/segmented/cudart.h)."""

    _fields_ = [
        ("type", c_int),
        ("reserved0", c_int * 3),
        ("handle", c_ulonglong),
        ("kind", c_int),
        ("size", c_uint),
        ("bodies", POINTER(c_void_p)),
        ("reserved", c_longlong * 27),
    ]


def load_cudart() -> ctypes.CDLL:
    """Returns the CUDA runtime, the one that PyTorch has loaded if it has.

    Raises:
        OSError: there is none.
    """
    for name in NAMES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"none of {', '.join(NAMES)} can be opened")


class SwitchGraph:
    """A graph of switch nodes, one after the other, between two bodies, of which the first runs: what `work` queues.

    Raises:
        RuntimeError: CUDA fails (graphs of CUDA 12.8 or later have switch nodes), or `work` may not be recorded.
    """

    def __init__(self, cudart: ctypes.CDLL, stream: int, work: Callable[[], object], switches: int = 1) -> None:
        self._cudart, self._stream = cudart, c_void_p(stream)
        graph, node = c_void_p(), None
        self._check("cudaGraphCreate", byref(graph), c_uint(0))
        for _ in range(switches):
            node = self._add(graph, node, work)
        self._executable = c_void_p()
        self._check("cudaGraphInstantiate", byref(self._executable), graph, c_ulonglong(0))
        self._check("cudaGraphDestroy", graph)

    def _add(self, graph: c_void_p, before: c_void_p | None, work: Callable[[], object]) -> c_void_p:
        """Adds a switch node, after another."""
        captured, node, handle = c_void_p(), c_void_p(), c_ulonglong()
        self._check("cudaGraphConditionalHandleCreate", byref(handle), graph, c_uint(0), c_uint(ASSIGN_DEFAULT))
        switch = SwitchNode(type=13, handle=handle.value, kind=2, size=2)
        two = hasattr(self._cudart, "cudaGraphAddNode_v2")  # CUDA 12, 13
        after = (None, None, c_size_t(0)) if before is None else (byref(before), None, c_size_t(1))
        self._check("cudaGraphAddNode_v2" if two else "cudaGraphAddNode", byref(node), graph, *after, byref(switch))
        body = c_void_p(switch.bodies[0])
        self._check("cudaStreamBeginCaptureToGraph", self._stream, body, None, None, c_size_t(0), c_int(IN_THREAD))
        try:
            work()
        finally:
            self._check("cudaStreamEndCapture", self._stream, byref(captured))
        return node

    def launch(self) -> None:
        """Queues the graph on the stream."""
        self._check("cudaGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Frees the graph, which must not run."""
        self._check("cudaGraphExecDestroy", self._executable)

    def _check(self, name: str, *arguments: object) -> None:
        if status := getattr(self._cudart, name)(*arguments):
            raise RuntimeError(f"{name} gave CUDA error {status}")
