"""The part of the CUDA runtime API that `CudaDevice` calls, on host memory, as late and as literal as a GPU may be.

Work queued on a stream is done when the stream is synchronized and not before, so what reads or overwrites staging
memory too early is found out. What is queued during a capture is recorded and done again, with the very same addresses,
at every launch of the graph.
"""

import ctypes
from enum import Enum
from types import SimpleNamespace


class Error(Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureInvalidated = 901


class FakeCudart:
    cudaError_t = Error
    cudaStreamNonBlocking = 1
    cudaHostAllocDefault = 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit  # bytes
        self.blocks: dict[int, ctypes.Array] = {}
        self.queue: list = []
        self.capture: list | None = None
        self.graphs: list[list] = []
        self.launches = 0
        self.executables = 0  # not destroyed
        self.fails: str | None = None  # the function that fails

    def enqueue(self, work) -> None:
        (self.queue if self.capture is None else self.capture).append(work)

    def cudaGetDeviceCount(self):
        return Error.cudaSuccess, 1

    def cudaSetDevice(self, device: int):
        return (Error.cudaSuccess,)

    def cudaMalloc(self, size: int):
        if sum(map(len, self.blocks.values())) + size > self.limit:
            return Error.cudaErrorMemoryAllocation, None
        block = (ctypes.c_uint8 * (size + 256))()
        ctypes.memset(block, 0xFF, size + 256)  # NaN wherever it is read before it is set
        start = ctypes.addressof(block)
        start += -start % 256
        self.blocks[start] = block
        return Error.cudaSuccess, start

    def cudaHostAlloc(self, size: int, flags: int):
        return self.cudaMalloc(size)

    def cudaFree(self, address: int):
        self.cudaStreamSynchronize(7)  # as CUDA does
        self.blocks.pop(address)
        return (Error.cudaSuccess,)

    cudaFreeHost = cudaFree

    def cudaStreamCreateWithFlags(self, flags: int):
        return Error.cudaSuccess, 7

    def cudaStreamDestroy(self, stream: int):
        return (Error.cudaSuccess,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int):
        self.enqueue(lambda: ctypes.memset(address, value, size))
        return (Error.cudaSuccess,)

    def cudaMemset2DAsync(self, address: int, pitch: int, value: int, width: int, height: int, stream: int):
        assert width <= pitch
        for row in range(height):
            self.enqueue(lambda start=address + row * pitch: ctypes.memset(start, value, width))
        return (Error.cudaSuccess,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int):
        self.enqueue(lambda: ctypes.memmove(target, source, size))
        return (Error.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int):
        assert self.capture is None, "a stream that is being captured may not be waited for"
        queue, self.queue = self.queue, []
        for work in queue:
            work()
        return (Error.cudaSuccess,)

    def _outcome(self, function: str) -> Error:
        return Error.cudaErrorStreamCaptureInvalidated if self.fails == function else Error.cudaSuccess

    def cudaStreamBeginCapture(self, stream: int, mode: int):
        outcome = self._outcome("cudaStreamBeginCapture")
        self.capture = None if outcome != Error.cudaSuccess else []
        return (outcome,)

    def cudaStreamEndCapture(self, stream: int):
        captured, self.capture = self.capture, None
        return self._outcome("cudaStreamEndCapture"), captured

    def cudaGraphInstantiate(self, graph: list, flags: int):
        outcome = self._outcome("cudaGraphInstantiate")
        if outcome == Error.cudaSuccess:
            self.graphs.append(graph)
            self.executables += 1
        return outcome, graph

    def cudaGraphDestroy(self, graph: list):
        return (Error.cudaSuccess,)

    def cudaGraphExecDestroy(self, graph: list):
        self.executables -= 1
        return (Error.cudaSuccess,)

    def cudaGraphLaunch(self, graph: list, stream: int):
        self.launches += 1
        for work in graph:
            self.enqueue(work)
        return (Error.cudaSuccess,)

    def cudaGetErrorString(self, error: Error):
        return Error.cudaSuccess, error.name.encode()
