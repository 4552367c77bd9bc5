"""A `Device` on a GPU: one CUDA stream, its memory, and the CUDA graphs recorded on it.

Work that comes with the same key is the same work on the same addresses: the first time it is queued as it is, the
second time it is queued and then recorded (TensorRT requires a run between a change of shape and the recording), and
from then on one launch replays it. Where that fails the device records no more and queues every run as it is, which is
slower: one warning. Uses NVIDIA's bindings (package cuda-bindings), not PyTorch.
"""

import ctypes
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import numpy as np

from tide_export.errors import GenerationError, ProviderError
from tide_export.runtime.segmented.device import Buffer

logger = logging.getLogger("tide_export")

MAX_GRAPHS = 256  # recorded per device; the least recently used is destroyed first
MAX_SEEN = 4096  # keys launched once


def import_cudart() -> ModuleType:
    """NVIDIA's Python bindings of the CUDA runtime.

    Raises:
        ProviderError: they are not installed.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise ProviderError(f"the CUDA bindings cannot be imported ({error}): pip install tide_export[gpu]") from None
    return runtime


_current = threading.local()  # `gpu`: the one that CUDA uses in this thread


def select_gpu(gpu: int) -> None:
    """Lets CUDA, and libraries on it, use this GPU in this thread.

    Raises:
        ProviderError: the bindings are missing, CUDA cannot be used, or there is no such GPU.
    """
    cuda = import_cudart()
    error, count = cuda.cudaGetDeviceCount()
    if error == cuda.cudaError_t.cudaSuccess and not 0 <= gpu < count:
        raise ProviderError(f"there is no GPU {gpu}: CUDA finds {count}, numbered from 0")
    if error == cuda.cudaError_t.cudaSuccess:
        (error,) = cuda.cudaSetDevice(gpu)
    if error != cuda.cudaError_t.cudaSuccess:
        raise ProviderError(f"the GPU cannot be used: {_reason(cuda, error)}")
    _current.gpu = gpu


class CudaDevice:
    """One stream with its memory (see `device.Device`).

    Attributes:
        recording: while work is recorded and not run.
    """

    def __init__(self, records: bool = True, gpu: int = 0) -> None:
        """Takes a stream of a GPU.

        Args:
            records: whether launches may be recorded; work on other streams cannot be.
            gpu: its number.

        Raises:
            ProviderError: see `select_gpu`.
        """
        select_gpu(gpu)
        self._cuda, self._gpu = import_cudart(), gpu
        self._records = records
        try:
            self.stream = int(self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking))
        except GenerationError as error:
            raise ProviderError(f"the GPU cannot be used: {error}") from None
        self.recording = False
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        weakref.finalize(self, _destroy, self._cuda, self.stream, self._graphs)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the runtime API on this GPU and returns its result, if it has one. Raises
        GenerationError: it did not succeed."""
        if getattr(_current, "gpu", None) != self._gpu:  # another thread's, or another engine's in this thread
            _current.gpu = None
            self._require("cudaSetDevice", self._cuda.cudaSetDevice(self._gpu)[0])
            _current.gpu = self._gpu
        error, *results = getattr(self._cuda, name)(*arguments)
        self._require(name, error)
        return results[0] if results else None

    def _require(self, name: str, error: Any) -> None:
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise GenerationError(f"CUDA failed ({name}): {_reason(self._cuda, error)}")

    def allocate(self, size: int) -> Buffer:
        address = int(self._call("cudaMalloc", size))
        owner = _Owner()
        weakref.finalize(owner, self._cuda.cudaFree, address)
        self.clear(address, size)
        return Buffer(address, size, owner)

    def staging(self, size: int) -> np.ndarray:
        address = int(self._call("cudaHostAlloc", size, self._cuda.cudaHostAllocDefault))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._cuda.cudaFreeHost, address)  # numpy keeps `memory` alive through every view
        array = np.ctypeslib.as_array(memory)
        array[:] = 0
        return array

    def upload(self, target: int, source: np.ndarray) -> None:
        self._copy(target, source.ctypes.data, source.nbytes, "cudaMemcpyHostToDevice")

    def download(self, target: np.ndarray, source: int) -> None:
        self._copy(target.ctypes.data, source, target.nbytes, "cudaMemcpyDeviceToHost")

    def copy(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size, "cudaMemcpyDeviceToDevice")

    def clear(self, target: int, size: int, count: int = 1, stride: int = 0) -> None:
        if count == 1:  # a stride may not be 2 GiB or more
            self._call("cudaMemsetAsync", target, 0, size, self.stream)
        else:
            self._call("cudaMemset2DAsync", target, stride, 0, size, count, self.stream)

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        self._call("cudaMemcpyAsync", target, source, size, getattr(self._cuda.cudaMemcpyKind, kind), self.stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def launch(self, key: Hashable, work: Callable[[], None]) -> None:
        if not self._records:
            work()
            return
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._seen:
                if len(self._seen) == MAX_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                work()
                return
            self._seen.remove(key)  # once destroyed, it must come twice again
            work()  # an engine that last ran another shape changes to this one in a run that is not recorded
            if self._records:  # unless that run ended recording
                self._record(key, work)
            return
        self._graphs.move_to_end(key)
        self._call("cudaGraphLaunch", graph, self.stream)

    def end_recording(self, reason: str) -> None:
        """Records no work from now on."""
        self._records = False
        _warn_of_no_recording(reason)

    def _record(self, key: Hashable, work: Callable[[], None]) -> None:
        """Keeps what `work` queues as an executable graph; nothing is run. Where it fails recording ends."""
        try:
            self._graphs[key] = self._recorded(work)
        except GenerationError as error:
            self.end_recording(str(error))
            return
        self._make_room()

    def _recorded(self, work: Callable[[], None]) -> Any:
        """The executable graph of what `work` queues. Raises GenerationError: it cannot be recorded."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        self.recording = True
        try:
            work()
        except BaseException:
            self._cuda.cudaStreamEndCapture(self.stream)  # or the stream would stay unusable
            raise
        finally:
            self.recording = False
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def _make_room(self) -> None:
        while len(self._graphs) > MAX_GRAPHS:
            self.synchronize()
            _, oldest = self._graphs.popitem(last=False)
            self._call("cudaGraphExecDestroy", oldest)


@functools.cache  # one warning, however many devices there are
def _warn_of_no_recording(reason: str) -> None:
    logger.warning("runs are not recorded as CUDA graphs, which makes decoding slower: %s", reason)


def _reason(cuda: ModuleType, error: Any) -> str:
    if error == cuda.cudaError_t.cudaErrorMemoryAllocation:
        return "the GPU has not enough free memory for the sequence's buffers"
    text = cuda.cudaGetErrorString(error)[1]
    return text.decode() if isinstance(text, bytes) else str(text)


def _destroy(cuda: ModuleType, stream: int, graphs: OrderedDict[Hashable, Any]) -> None:
    """Frees a device's stream and executable graphs, when nothing of them runs any more."""
    cuda.cudaStreamSynchronize(stream)
    for graph in graphs.values():
        cuda.cudaGraphExecDestroy(graph)
    cuda.cudaStreamDestroy(stream)


class _Owner:
    """A buffer's memory lives as long as this object."""
