"""What all sequences on a bundle's segment networks share: the networks, and buffers that are used again.

A sequence's buffers, and what its device has recorded, are worth keeping: when a sequence is garbage its buffers serve
the next one.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tide_export.bundle.manifest import Manifest, NetworksInfo
from tide_export.errors import GenerationError
from tide_export.runtime.segmented.batch import SegmentedBatch
from tide_export.runtime.segmented.batch_memory import BatchBuffers
from tide_export.runtime.segmented.device import Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec
from tide_export.runtime.segmented.run_plan import padded
from tide_export.runtime.segmented.sequence import SegmentedSequence
from tide_export.runtime.segmented.sequence_memory import SequenceBuffers
from tide_export.runtime.sequence import ROOM

B = TypeVar("B", SequenceBuffers, BatchBuffers)
OpenDevice = Callable[[], tuple[Device, Mapping[str, Network]]]


class SegmentBackend:
    """The networks of one bundle on one engine. See `Backend`.

    Attributes:
        provider: cpu, cuda, torch, tensorrt or tensorrt-rtx.
        max_batch_size: sequences a batch can have; 1: there are no batches.
        specs: tensors of the networks.
    """

    def __init__(
        self,
        manifest: Manifest,
        info: NetworksInfo,
        specs: Mapping[str, NetworkSpec],
        open_device: OpenDevice,
        provider: str,
    ) -> None:
        """`open_device` gives a new device and the networks on it, by name: one for each set of buffers."""
        self.provider = provider
        self.max_batch_size, self.specs = info.max_batch_size, specs
        self._manifest, self._info = manifest, info
        self._capacity = min(manifest.model.context_length or info.capacity, info.capacity)
        # The pending tokens a bundle is meant for and the new one, in the padded run over them.
        self._pending_capacity = padded(manifest.max_pending + 1, 0, info.capacity, info.capacity)
        self._open_device = open_device
        self._idle: list[SequenceBuffers] = []
        self._idle_batches: list[BatchBuffers] = []
        self._lock = threading.Lock()

    def start(self, thresholds: Sequence[float], max_pending: int, room: int = ROOM) -> SegmentedSequence:
        """See `Backend.start`. `room` has no effect: the K/V buffers have the length of the networks."""
        with self._lock:
            buffers = self._idle.pop() if self._idle else None
        if buffers is None:
            device, networks = self._open_device()
            buffers = SequenceBuffers(self.specs, networks, device, self._info, self._pending_capacity)
        else:
            buffers.clear()
        sequence = SegmentedSequence(buffers, self._manifest, thresholds, max_pending, self._capacity)
        weakref.finalize(sequence, _keep, self._idle, buffers)
        return sequence

    def start_batch(
        self, thresholds: Sequence[float], max_pending: int, compaction_threshold: float, slots: int
    ) -> SegmentedBatch:
        """See `Backend.start_batch`. Idle buffers that are too small are freed, so that two sizes are never held."""
        if self.max_batch_size == 1:
            raise GenerationError(
                "the networks of this bundle take one sequence at a time (exported with --batch-size 1, or the export "
                "said why): give one prompt at a time, or use provider 'cpu'"
            )
        slots = min(slots, self.max_batch_size)
        with self._lock:
            buffers = next((one for one in self._idle_batches if one.slots >= slots), None)
            if buffers is None:
                self._idle_batches.clear()
            else:
                self._idle_batches.remove(buffers)
        if buffers is None:
            device, networks = self._open_device()
            buffers = BatchBuffers(self.specs, networks, device, self._info, slots, self._pending_capacity)
        else:
            buffers.clear(range(buffers.slots))
        options = (thresholds, max_pending, compaction_threshold, slots, self._capacity)
        batch = SegmentedBatch(buffers, self._manifest, *options)
        weakref.finalize(batch, _keep, self._idle_batches, buffers)
        return batch


def _keep(idle: list[B], buffers: B) -> None:
    """Keeps the buffers of a sequence or batch that is garbage, unless an exception ended a step of it."""
    if not buffers.busy:
        idle.append(buffers)
