"""What all sequences on a bundle's segment networks share: the loaded networks, and lanes that are used again.

`Engine` holds a `SegmentBackend` as its session. A lane's buffers, and what its device has recorded, are worth keeping:
when a sequence is gone its lane serves the next one.
"""

import threading
import weakref
from collections.abc import Callable, Mapping

from tide_export.manifest import Manifest, NetworksInfo
from tide_export.runtime.segmented.device import Device
from tide_export.runtime.segmented.lane import Lane, padded
from tide_export.runtime.segmented.network import Network, NetworkSpec

OpenLane = Callable[[], tuple[Device, Mapping[str, Network]]]


class SegmentBackend:
    """The networks of one bundle on one engine. Safe to use from several threads.

    Attributes:
        capacity: tokens a sequence can have.
        specs: what the networks take and give.
    """

    def __init__(
        self, manifest: Manifest, info: NetworksInfo, specs: Mapping[str, NetworkSpec], open_lane: OpenLane
    ) -> None:
        """`open_lane` gives a new device and the networks on it, by name, one set per lane."""
        self.capacity, self.specs = info.capacity, specs
        self._info = info
        # The pending tokens a bundle is meant for and the new one, in the padded run over them.
        self._waiting_rows = padded(manifest.max_pending + 1, 0, info.capacity, info.capacity)
        self._open_lane = open_lane
        self._free: list[Lane] = []
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
        weakref.finalize(user, self._free.append, lane)
        return lane
