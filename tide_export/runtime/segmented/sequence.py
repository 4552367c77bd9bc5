"""One sequence over networks of one segment each: after every router, decides whether the next segment runs.

The same rule as in the graph of `compose.step_graph`, in Python. `sequence_memory` holds the buffers and runs the
networks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.segmented.sequence_memory import SequenceBuffers
from tide_export.runtime.sequence import SingleSequence, StepResult, check_step


class SegmentedSequence(SingleSequence):
    """Lengths and pending tokens of one sequence in `buffers`."""

    def __init__(
        self,
        buffers: SequenceBuffers,
        manifest: Manifest,
        thresholds: Sequence[float],
        max_pending: int,
        capacity: int,
    ) -> None:
        """An empty sequence; see `Backend.start`. `capacity`: tokens it can have."""
        super().__init__(len(manifest.segment_sizes))
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._max_pending, self._capacity = max_pending, capacity
        self._scores = np.empty(len(thresholds), np.float32)
        self._buffers = buffers
        self.set_thresholds(thresholds)

    @property
    def capacity(self) -> int:
        """Tokens the sequence can have."""
        return self._capacity

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        for k, threshold in enumerate(thresholds):
            self._buffers.set_threshold(k, threshold)

    def save(self) -> Any:
        return self.length

    def restore(self, saved: Any) -> None:
        if self._buffers.busy:
            raise GenerationError("the generation was interrupted in the middle of a step: start it again")
        self.rewind(saved)

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        total = check_step(ids, self.lengths[0], self._capacity)
        buffers, lengths = self._buffers, self.lengths
        buffers.busy = True
        keep, ran = min(logits_to_keep, total - lengths[-1]), 0
        for k, length in enumerate(lengths):
            forced = full or total - length > self._max_pending
            if k > 0 and not forced and buffers.verdict(k - 1)[1]:
                break
            following = lengths[k + 1] if k + 1 < len(lengths) else length
            buffers.run(k, ids, total - length, length, target=length - following, keep=keep)
            ran += 1
        # Of a token that could exit before a segment that was forced to run, the first exit counts.
        self._scores[:] = np.nan
        exit_segment = ran - 1
        for k in reversed(range(min(ran, len(self._scores)))):
            self._scores[k], exits = buffers.verdict(k)
            exit_segment = k if exits and not full else exit_segment
        deepest = exit_segment == len(lengths) - 1
        logits = buffers.position_logits() if deepest and keep > 1 else buffers.logits(exit_segment)[None]
        self.lengths = [total if k < ran else length for k, length in enumerate(lengths)]
        buffers.busy = False
        return StepResult(logits[-1], logits, self._depths[exit_segment], ran, self._scores)
