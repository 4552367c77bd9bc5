"""What the buffers of one sequence and of a batch share: small tensors that cross in one copy, and the head."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import NetworksInfo
from tide_export.runtime.segmented.device import ALIGNMENT, Buffer, Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def grown(capacity: int, needed: int) -> int:
    """The new capacity of a buffer that must hold `needed`: at least doubled where it grows, so that copies are few."""
    return capacity if needed <= capacity else max(needed, 2 * capacity)


class Block:
    """Parts at aligned offsets of one buffer, and the same on the host, so that all cross in one copy."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._starts = [sum(map(aligned, sizes[:part])) for part in range(len(sizes) + 1)]
        self._buffer = device.allocate(self._starts[-1])
        self._device, self._host = device, device.staging(self._starts[-1])

    def address(self, part: int) -> int:
        return self._buffer.address + self._starts[part]

    def host(self, part: int, dtype: type) -> np.ndarray:
        return self._host[self._starts[part] : self._starts[part + 1]].view(dtype)

    def upload(self, part: int, size: int) -> None:
        """All up to the first `size` bytes of a part."""
        self._device.upload(self._buffer.address, self._host[: self._starts[part] + size])

    def download(self, first: int, last: int, size: int) -> None:
        """All from part `first` to the first `size` bytes of part `last`."""
        start, stop = self._starts[first], self._starts[last] + size
        self._device.download(self._host[start:stop], self._buffer.address + start)


class NetworkBuffers(ABC):
    """Memory on a device, and the run of the head.

    Attributes:
        busy: while a step is made; after one that an exception ended, what is queued and recorded is not known.
    """

    def __init__(
        self, specs: Mapping[str, NetworkSpec], networks: Mapping[str, Network], device: Device, info: NetworksInfo
    ) -> None:
        self.busy = False
        self._specs, self._networks, self._device, self._info = specs, networks, device, info
        self._segments = len(specs) - 1
        logits = specs[names.HEAD].outputs[names.LOGITS]
        self._vocabulary = logits.dims(1)[-1]
        self._logits = self._allocate(logits.size(info.max_logits))
        self._logits_host = device.staging(self._logits.size).view(np.float32)

    def _allocate(self, size: int) -> Buffer:
        return self._device.allocate(max(size, ALIGNMENT))

    @abstractmethod
    def _synchronize(self) -> None:
        """Waits for the device."""

    def _head(self, states: int, tokens: int) -> np.ndarray:
        """Logits float32 [tokens, V] of the states at an address, a view of a buffer."""
        host = self._logits_host[: tokens * self._vocabulary]
        addresses = {names.EXIT_STATES: states, names.LOGITS: self._logits.address}

        def work() -> None:
            self._networks[names.HEAD].run(addresses, tokens)
            self._device.download(host, self._logits.address)

        self._device.launch((names.HEAD, states, tokens), work)
        self._synchronize()
        return host.reshape(tokens, self._vocabulary)
