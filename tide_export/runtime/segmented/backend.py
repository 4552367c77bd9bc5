"""What all sequences on a bundle's segment networks share: the loaded networks, and lanes that are used again, of one
sequence or of a batch.

`Engine` holds a `SegmentBackend` as its session. A lane's buffers, and what its device has recorded, are worth keeping:
when a sequence is gone its lane serves the next one.
"""

import threading
import weakref
from collections.abc import Callable, Mapping

from tide_export.bundle.manifest import Manifest, NetworksInfo
from tide_export.errors import GenerationError
from tide_export.runtime.segmented.batch_memory import BatchLane
from tide_export.runtime.segmented.device import Device
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec
from tide_export.runtime.segmented.run_plan import padded
from tide_export.runtime.segmented.sequence_memory import Lane

OpenLane = Callable[[], tuple[Device, Mapping[str, Network]]]


class SegmentBackend:
    """The networks of one bundle on one engine. Safe to use from several threads.

    Attributes:
        capacity: tokens a sequence can have.
        max_batch_size: sequences a batch can have; 1: there are no batches.
        specs: what the networks take and give.
    """

    def __init__(
        self, manifest: Manifest, info: NetworksInfo, specs: Mapping[str, NetworkSpec], open_lane: OpenLane
    ) -> None:
        """`open_lane` gives a new device and the networks on it, by name, one set per lane."""
        self.capacity, self.max_batch_size, self.specs = info.capacity, info.max_batch_size, specs
        self._info = info
        # The pending tokens a bundle is meant for and the new one, in the padded run over them.
        self._waiting_rows = padded(manifest.max_pending + 1, 0, info.capacity, info.capacity)
        self._open_lane = open_lane
        self._free: list[Lane] = []
        self._free_batches: list[BatchLane] = []
        self._lock = threading.Lock()

    def lane(self, user: object) -> Lane:
        """A lane for `user` alone, until `user` is garbage.

        Raises:
            GenerationError: no memory for another.
        """
        with self._lock:
            lane = self._free.pop() if self._free else None
        if lane is None:
            device, networks = self._open_lane()
            lane = Lane(self.specs, networks, device, self._info, self._waiting_rows)
        else:
            lane.clear()
        weakref.finalize(user, self._free.append, lane)
        return lane

    def batch_lane(self, user: object, rows: int) -> BatchLane:
        """A lane of `rows` places or more for `user` alone, until `user` is garbage; of `max_batch_size` at most.

        Its K/V buffers are as large as those of so many sequences. Of lanes that nobody uses those that are too small
        are given up, lest two sizes be held.

        Raises:
            GenerationError: no memory for it, or the networks take one sequence at a time.
        """
        if self.max_batch_size == 1:
            raise GenerationError(
                "the networks of this bundle take one sequence at a time (exported with --batch-size 1, or the export "
                "said why): give one prompt at a time, or use provider 'cpu'"
            )
        rows = min(rows, self.max_batch_size)
        with self._lock:
            lane = next((one for one in self._free_batches if one.rows >= rows), None)
            if lane is None:
                self._free_batches.clear()
            else:
                self._free_batches.remove(lane)
        if lane is None:
            device, networks = self._open_lane()
            lane = BatchLane(self.specs, networks, device, self._info, rows, self._waiting_rows)
        else:
            lane.clear(range(lane.rows))
        weakref.finalize(user, self._free_batches.append, lane)
        return lane
