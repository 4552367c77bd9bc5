"""Calls the CUDA runtime to open TensorRT's plans, through NVIDIA's package cuda-bindings."""

from types import ModuleType
from typing import Any

from tide_export.errors import GenerationError, ProviderError


def import_cudart() -> ModuleType:
    """Imports NVIDIA's Python bindings of the CUDA runtime.

    Raises:
        ProviderError: they are not installed.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise ProviderError(
            f"the CUDA bindings cannot be imported ({error}): pip install -e '.[gpu]' in the clone"
        ) from None
    return runtime


def select_gpu(gpu: int) -> None:
    """Makes a GPU the one that CUDA uses in this thread.

    Raises:
        ProviderError: the bindings are missing, CUDA cannot be used, or the GPU does not exist.
    """
    cuda = import_cudart()
    error, count = cuda.cudaGetDeviceCount()
    if error == cuda.cudaError_t.cudaSuccess and not 0 <= gpu < count:
        raise ProviderError(f"there is no GPU {gpu}: CUDA finds {count}, numbered from 0")
    if error == cuda.cudaError_t.cudaSuccess:
        (error,) = cuda.cudaSetDevice(gpu)
    if error != cuda.cudaError_t.cudaSuccess:
        raise ProviderError(f"the GPU cannot be used: {_reason(cuda, error)}")


def synchronize(stream: int) -> None:
    """Waits for the work on a stream; GenerationError if it failed."""
    _call("cudaStreamSynchronize", stream)


class CudaMemory:
    """Holds `size` bytes of GPU memory at `address` until `free`."""

    def __init__(self, gpu: int, size: int) -> None:
        """Allocates the memory; GenerationError if the GPU has too little."""
        _call("cudaSetDevice", gpu)
        self.address, self.size = int(_call("cudaMalloc", size)), size

    def free(self) -> None:
        _call("cudaFree", self.address)


def _call(name: str, *arguments: Any) -> Any:
    cuda = import_cudart()
    error, *results = getattr(cuda, name)(*arguments)
    if error != cuda.cudaError_t.cudaSuccess:
        raise GenerationError(f"CUDA failed ({name}): {_reason(cuda, error)}")
    return results[0] if results else None


def _reason(cuda: ModuleType, error: Any) -> str:
    if error == cuda.cudaError_t.cudaErrorMemoryAllocation:
        return "the GPU has not enough free memory for the sequence's buffers"
    text = cuda.cudaGetErrorString(error)[1]
    return text.decode() if isinstance(text, bytes) else str(text)
