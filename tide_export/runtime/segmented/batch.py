"""Several sequences over networks of one segment each: after every segment, `depth_rule` selects which of them go on.

`batch_memory` holds the buffers and runs the networks.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.decoding.depth_rule import active_slots, scheduled_slots
from tide_export.runtime.segmented.batch_memory import BatchBuffers
from tide_export.runtime.sequence import ExitRule, SequenceState, StepResult, check_step


class SegmentedBatch:
    """Sequences in the slots of `buffers`. See `sequence.Batch`.

    Attributes:
        sequences: by slot.
    """

    def __init__(
        self,
        buffers: BatchBuffers,
        manifest: Manifest,
        thresholds: Sequence[float],
        max_pending: int,
        compaction_threshold: float,
        slots: int,
        capacity: int,
    ) -> None:
        """An empty batch of so many slots; see `Backend.start_batch`. `capacity`: tokens a sequence can have."""
        self.sequences: dict[int, SequenceState] = {}
        self._segments = len(manifest.segment_sizes)
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._rule, self._compaction = ExitRule.of(thresholds, max_pending), compaction_threshold
        self._rules = dict[int, ExitRule]()
        self._capacity, self._buffers = capacity, buffers
        self._free = list(range(slots))
        self._used = set[int]()  # slots whose buffers hold what a sequence left there

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def join(self, thresholds: Sequence[float] | None = None, max_pending: int | None = None) -> int:
        """See `sequence.Batch.join`. It is the first free slot, because adjacent slots run in one run."""
        slot = heapq.heappop(self._free)
        if slot in self._used:
            self._buffers.clear([slot])
            self._used.remove(slot)
        self.sequences[slot] = SequenceState(self._segments)
        self._rules[slot] = self._rule.but(thresholds, max_pending)
        return slot

    def leave(self, slot: int) -> None:
        del self.sequences[slot], self._rules[slot]
        self._used.add(slot)
        heapq.heappush(self._free, slot)

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, StepResult]:
        everyone, buffers, keep = sorted(new), self._buffers, logits_to_keep or {}
        totals = {slot: check_step(new[slot], self.sequences[slot].lengths[0], self._capacity) for slot in everyone}
        ids = {slot: np.asarray(new[slot]) for slot in everyone}
        ran: list[list[int]] = []
        buffers.busy = True
        exits: dict[int, int] = {}  # the first segment that each could exit after
        active = everyone
        max_pending = {slot: self._rules[slot].max_pending for slot in everyone}
        for k in range(self._segments):
            lengths = [
                self.sequences[slot].lengths[k] if slot in self.sequences else 0 for slot in range(buffers.slots)
            ]
            if k:
                active = active_slots(active, exits, {s: totals[s] - lengths[s] for s in active}, max_pending)
            run = scheduled_slots(active, everyone, ran[-1] if k else None, self._compaction) if active else []
            if k:
                stopped = sorted(set(ran[-1]) - set(run))
                buffers.append_pending(k, {slot: self._pending(k, slot) for slot in stopped})
            if not run:
                break
            pending = {slot: self._pending(k, slot) for slot in run}
            buffers.run(k, {slot: totals[slot] - lengths[slot] for slot in run}, lengths, pending, ids)
            ran.append(run)
            exiting = self._exiting(k, run, exits, keep, full)
            exits |= dict.fromkeys(exiting, k)
            buffers.exit(exiting)
        logits = buffers.logits()
        for k, slots in enumerate(ran):
            for slot in slots:
                self.sequences[slot].lengths[k] = totals[slot]
        buffers.busy = False
        return {
            slot: StepResult(
                logits[slot][-1], logits[slot], self._depths[exits[slot]], sum(slot in slots for slots in ran)
            )
            for slot in everyone
        }

    def _pending(self, k: int, slot: int) -> int:
        """Tokens pending before segment k."""
        lengths = self.sequences[slot].lengths
        return lengths[k - 1] - lengths[k] if k else 0

    def _exiting(
        self, k: int, run: list[int], exits: Collection[int], keep: Mapping[int, int], full: Collection[int]
    ) -> dict[int, int]:
        """The slots of `run` that exit after segment k, which has just run, and for how many of their last tokens."""
        if k + 1 == self._segments:
            return {slot: keep.get(slot, 1) for slot in run if slot not in exits or slot in keep}
        scores = self._buffers.scores()
        exiting = [slot for slot in run if scores[slot] > self._rules[slot].thresholds[k]]
        return {slot: 1 for slot in exiting if slot not in exits and slot not in full}
