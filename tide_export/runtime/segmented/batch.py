"""Several sequences over networks of one segment each, in the slots of one set of buffers."""

import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tide_export.runtime.segmented.steps import SegmentedSteps
from tide_export.runtime.sequence import ExitRule, SequenceState, StepResult


class SegmentedBatch:
    """Sequences in the slots of the buffers of `steps`. See `sequence.Batch`.

    Attributes:
        sequences: by slot.
    """

    def __init__(self, steps: SegmentedSteps, segments: int, compaction_threshold: float, slots: int) -> None:
        """An empty batch of so many slots; see `Backend.start_batch`."""
        self.sequences: dict[int, SequenceState] = {}
        self._segments, self._compaction = segments, compaction_threshold
        self._rules = dict[int, ExitRule]()
        self._steps, self._buffers = steps, steps.buffers
        self._free = list(range(slots))
        self._used = set[int]()  # slots whose buffers hold what a sequence left there

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def join(self, thresholds: Sequence[float], max_pending: int) -> int:
        """See `sequence.Batch.join`. It is the first free slot, because adjacent slots run in one run."""
        slot = heapq.heappop(self._free)
        if slot in self._used:
            self._buffers.clear([slot])
            self._used.remove(slot)
        self.sequences[slot] = SequenceState(self._segments)
        self._rules[slot] = ExitRule.of(thresholds, max_pending)
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
        return self._steps.step(self.sequences, self._rules, new, logits_to_keep or {}, full, self._compaction)
