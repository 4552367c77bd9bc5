"""What all sequences on a bundle's segment networks share: the networks, and buffers that are used again.

A sequence's buffers, and what its device has recorded, are worth keeping: when a sequence is garbage its buffers serve
the next one.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

from tide_export.bundle.engine_fields import NetworksInfo
from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.segmented.batch import SegmentedBatch
from tide_export.runtime.segmented.device import Device
from tide_export.runtime.segmented.memory import SegmentBuffers
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec
from tide_export.runtime.segmented.sequence import SegmentedSequence
from tide_export.runtime.segmented.steps import SegmentedSteps
from tide_export.runtime.sequence import ROOM

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
        self._open_device = open_device
        self._idle: list[SegmentBuffers] = []
        self._idle_batches: list[SegmentBuffers] = []
        self._lock = threading.Lock()

    def start(self, thresholds: Sequence[float], max_pending: int, room: int = ROOM) -> SegmentedSequence:
        """See `Backend.start`. `room` has no effect: the K/V buffers have the length of the networks."""
        with self._lock:
            buffers = self._idle.pop() if self._idle else None
        if buffers is None:
            buffers = self._new_buffers(1)
        else:
            buffers.clear((0,))
        segments = len(self._manifest.segment_sizes)
        sequence = SegmentedSequence(self._steps(buffers), segments, thresholds, max_pending)
        weakref.finalize(sequence, _keep, self._idle, buffers)
        return sequence

    def start_batch(self, compaction_threshold: float, slots: int) -> SegmentedBatch:
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
            buffers = self._new_buffers(slots)
        else:
            buffers.clear(range(buffers.slots))
        segments = len(self._manifest.segment_sizes)
        batch = SegmentedBatch(self._steps(buffers), segments, compaction_threshold, slots)
        weakref.finalize(batch, _keep, self._idle_batches, buffers)
        return batch

    def _new_buffers(self, slots: int) -> SegmentBuffers:
        device, networks = self._open_device()
        return SegmentBuffers(self.specs, networks, device, self._info, slots)

    def _steps(self, buffers: SegmentBuffers) -> SegmentedSteps:
        return SegmentedSteps(buffers, self._manifest, self._info)


def _keep(idle: list[SegmentBuffers], buffers: SegmentBuffers) -> None:
    """Keeps the buffers of a sequence or batch that is garbage, unless an exception ended a step of it."""
    if not buffers.busy:
        idle.append(buffers)
