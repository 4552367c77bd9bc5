"""Where a sequence's memory is and its work is queued: on the host here, on a GPU in `cuda`.

A `Device` is one queue with memory: `SequenceBuffers` and `BatchBuffers` allocate from it, copy within it, and give it
work that it may record and replay. Addresses are plain integers, so the arithmetic of offsets is the same on both, and
what the CPU tests prove holds on a GPU too.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tide_export.errors import GenerationError

ALIGNMENT = 256  # bytes; what CUDA allocates at and TensorRT requires of an address


class Buffer(NamedTuple):
    """`size` bytes at `address`, zeroed when allocated; freed when `owner` is."""

    address: int
    size: int
    owner: Any


class Device(Protocol):
    """One queue of work with its memory. Calls return at once and are carried out in order."""

    def allocate(self, size: int) -> Buffer:
        """Zeroed memory at an aligned address.

        Raises:
            GenerationError: there is not enough.
        """
        ...

    def staging(self, size: int) -> np.ndarray:
        """Zeroed uint8 [size] on the host that `upload` and `download` reach without another copy."""
        ...

    def upload(self, target: int, source: np.ndarray) -> None:
        """Staging memory to the device; `source` must not change until the queue has read it."""
        ...

    def download(self, target: np.ndarray, source: int) -> None:
        """From the device to staging memory, to be read after `synchronize`."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Between regions of the device that do not overlap."""
        ...

    def clear(self, target: int, size: int, count: int = 1, stride: int = 0) -> None:
        """Zeroes `size` bytes of the device, `count` times, `stride` bytes apart."""
        ...

    def launch(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queues what `work` queues. Of equal keys the work is equal, addresses included, so it may be recorded."""
        ...

    def synchronize(self) -> None:
        """Waits until everything queued is done.

        Raises:
            GenerationError: something queued has failed.
        """
        ...


class Block:
    """Parts at aligned offsets of one buffer, and the same on the host, so that all cross in one copy."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._starts = [sum(size + -size % ALIGNMENT for size in sizes[:part]) for part in range(len(sizes) + 1)]
        self._buffer = device.allocate(self._starts[-1])
        self._device, self._host = device, device.staging(self._starts[-1])

    def address(self, part: int) -> int:
        return self._buffer.address + self._starts[part]

    def host(self, part: int, dtype: type) -> np.ndarray:
        return self._host[self._starts[part] : self._starts[part + 1]].view(dtype)

    def upload(self, part: int, size: int) -> None:
        """All up to the first `size` bytes of a part."""
        self._device.upload(self._buffer.address, self._host[: self._starts[part] + size])

    def download(self, part: int, size: int) -> None:
        """All up to the first `size` bytes of a part."""
        self._device.download(self._host[: self._starts[part] + size], self._buffer.address)


class HostDevice:
    """The host: everything is done when it is called."""

    def allocate(self, size: int) -> Buffer:
        try:
            memory = np.zeros(size + ALIGNMENT, np.uint8)
        except MemoryError:
            raise GenerationError(f"not enough memory for {size} bytes of a sequence's buffers") from None
        start = memory.ctypes.data
        return Buffer(start + -start % ALIGNMENT, size, memory)

    def staging(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def upload(self, target: int, source: np.ndarray) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def download(self, target: np.ndarray, source: int) -> None:
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def clear(self, target: int, size: int, count: int = 1, stride: int = 0) -> None:
        for index in range(count):
            ctypes.memset(target + index * stride, 0, size)

    def launch(self, key: Hashable, work: Callable[[], None]) -> None:
        work()

    def synchronize(self) -> None:
        pass
