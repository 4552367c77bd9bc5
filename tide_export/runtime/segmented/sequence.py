"""One sequence over networks of one segment each: decides, after every router, whether the next segment runs.

The same machine as in `compose.step_graph`'s graph, in Python: `Engine` uses a `SegmentedState` where it would use a
`SequenceState`. A token that exits leaves its hidden state waiting before the next segment; a later token takes all
that wait along. Where the memory is and what runs the networks is `lane`'s affair.
"""

from collections.abc import Sequence

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.branched.sequence import ROOM, StepResult, check_rewind, check_step
from tide_export.runtime.segmented.backend import SegmentBackend


class SegmentedState:
    """Lengths and waiting tokens of one sequence, whose memory is a lane of `backend`.

    Attributes:
        lengths: tokens in each segment's K/V buffers, shallowest first; never increasing with depth.
    """

    def __init__(
        self,
        backend: SegmentBackend,
        manifest: Manifest,
        thresholds: Sequence[float],
        max_pending: int,
        room: int = ROOM,
    ) -> None:
        """An empty sequence.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them (2.0 = off).
            max_pending: a segment is forced to run when more tokens than this would wait before it.
            room: not used; the K/V buffers of these networks have the length they were exported with.

        Raises:
            GenerationError: no memory for the sequence's buffers.
        """
        self.lengths = [0] * len(manifest.segment_sizes)
        self._limit = min(manifest.model.context_length or backend.capacity, backend.capacity)
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._max_pending = max_pending
        self._scores = np.full(len(thresholds), np.nan, np.float32)
        self._lane = backend.lane(self)
        self.set_thresholds(thresholds)

    @property
    def capacity(self) -> int:
        """Tokens the sequence can have."""
        return self._limit

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def computed(self) -> list[int]:
        """Tokens of the sequence that each segment has run over."""
        return self.lengths

    @property
    def waiting(self) -> list[int]:
        """Tokens waiting before segment 1, 2, ... K-1."""
        return [before - after for before, after in zip(self.lengths, self.lengths[1:], strict=False)]

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Uses other thresholds, one per checkpoint, from the next step on; what waits goes on waiting."""
        for k, threshold in enumerate(thresholds):
            self._lane.set_threshold(k, threshold)

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        """Runs S new tokens; the result is about the last of them, its arrays change with the next step.

        Args:
            ids: S >= 1 token ids, each in [0, vocab_size).
            logits_to_keep: how many of the last positions get logits where the last segment runs, at least 1; no more
                than the tokens it runs over come.
            full: run every segment and let nothing exit, whatever the thresholds.

        Raises:
            GenerationError: no ids, more tokens than the sequence can have, no memory for waiting tokens, or the engine
                failed. The sequence is as it was before the step.
        """
        total = check_step(ids, self.lengths[0], self._limit)
        lane, lengths = self._lane, self.lengths
        keep, ran = min(logits_to_keep, total - lengths[-1]), 0
        for k, length in enumerate(lengths):
            forced = full or total - length > self._max_pending
            if k > 0 and not forced and lane.verdict(k - 1)[1]:
                break
            behind = lengths[k + 1] if k + 1 < len(lengths) else length
            lane.run(k, ids, total - length, length, target=length - behind, keep=keep)
            ran += 1
        # Of a token that left while a segment was forced to run behind it, the first exit counts.
        self._scores[:] = np.nan
        left = ran - 1
        for k in reversed(range(min(ran, len(self._scores)))):
            self._scores[k], leaves = lane.verdict(k)
            left = k if leaves and not full else left
        deepest = left == len(lengths) - 1
        rows = lane.rows() if deepest and keep > 1 else lane.logits(left)[None]
        self.lengths = [total if k < ran else length for k, length in enumerate(lengths)]
        return StepResult(rows[-1], rows, self._depths[left], ran, self._scores)

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`, as if they had never been stepped.

        What waits lies in the order of the tokens, so fewer wait; what the K/V buffers hold beyond is written over
        before it is read.

        Raises:
            GenerationError: `length` is negative or more than the sequence has.
        """
        check_rewind(self.lengths[0], length)
        self.lengths = [min(own, length) for own in self.lengths]
