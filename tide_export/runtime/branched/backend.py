"""The branched graph for one sequence, and its packed batch networks for several, in ONNX Runtime on the CPU."""

from collections.abc import Sequence
from typing import Any

from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.runtime.branched.sequence import BranchedSequence
from tide_export.runtime.onnxruntime.kv_buffers import KvBuffers
from tide_export.runtime.packed.batch import PackedBatch, StartAlone
from tide_export.runtime.packed.networks import MAX_BATCH_SIZE, BatchNetworks, BatchSessions
from tide_export.runtime.packed.propagate import PropagatingBatch
from tide_export.runtime.sequence import ROOM


class BranchedBackend:
    """See `Backend`. The networks of batches open when the first batch starts.

    Attributes:
        session: the branched graph's.
        batch_networks: those of batches.
    """

    provider = "cpu"

    def __init__(self, bundle: Bundle, session: Any, threads: int | None = None) -> None:
        """`threads`: that one run of a batch may use; None leaves it to ONNX Runtime."""
        self._bundle, self._manifest, self.session = bundle, bundle.manifest, session
        self.batch_networks = BatchNetworks(bundle, threads)

    @property
    def max_batch_size(self) -> int:
        return self.batch_networks.max_batch_size

    def start(self, thresholds: Sequence[float], max_pending: int, room: int = ROOM) -> BranchedSequence:
        self._bundle.check_weights()
        return BranchedSequence(self.session, self._manifest, thresholds, max_pending, room)

    def start_batch(self, compaction_threshold: float, slots: int) -> PackedBatch:
        sessions = self.batch_networks.sessions(min(slots, MAX_BATCH_SIZE))
        return empty_batch(sessions, self._manifest, compaction_threshold, self._start_alone)

    def _start_alone(self, thresholds: Sequence[float], max_pending: int, kv: KvBuffers) -> BranchedSequence:
        return BranchedSequence(self.session, self._manifest, thresholds, max_pending, kv=kv)


def empty_batch(
    sessions: BatchSessions,
    manifest: Manifest,
    compaction_threshold: float,
    start_alone: StartAlone | None = None,
) -> PackedBatch:
    """A batch of the bundle's kind of K/V cache; see `PackedBatch`. Where K/V are propagated nothing is ever pending,
    so `compaction_threshold` and the `max_pending` of its sequences have no effect."""
    if manifest.kv_cache_strategy == PROPAGATE:
        return PropagatingBatch(sessions, manifest, start_alone)
    return PackedBatch(sessions, manifest, compaction_threshold, start_alone)
