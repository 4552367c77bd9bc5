"""Several sequences over networks of one segment each: after every segment, which of them go on, as `batch.rule` says.

`Engine.generate` of a list of prompts uses a `SegmentedBatch` where the engine is TensorRT or ONNX Runtime on CUDA, and
a `runtime.packed.batch.Batch` on the CPU. Where the memory is and what runs the networks is `batch_lane`'s affair.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.branched.sequence import check_rewind, check_step
from tide_export.runtime.decoding.depth_rule import RowResult, runners, still_needing
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.thresholds.resolve import NEVER_EXIT


class SegmentedRow:
    """One sequence of a batch.

    Attributes:
        lengths: tokens in each segment's K/V buffers, shallowest first; never increasing with depth.
    """

    def __init__(self, segments: int) -> None:
        self.lengths = [0] * segments

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def computed(self) -> list[int]:
        """Tokens of the sequence that each segment has run over."""
        return self.lengths

    def waiting(self, k: int) -> int:
        """Tokens that wait before segment k."""
        return self.lengths[k - 1] - self.lengths[k] if k else 0

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`, as if they had never been stepped: what lies behind, in the K/V
        buffers and among what waits, is written over before it is read.

        Raises:
            GenerationError: `length` is negative or more than the sequence has.
        """
        check_rewind(self.length, length)
        self.lengths = [min(own, length) for own in self.lengths]


class SegmentedBatch:
    """Sequences at the places of a lane of `backend`. Serves one thread at a time.

    Attributes:
        rows: the sequences, by place.
    """

    def __init__(
        self,
        backend: SegmentBackend,
        manifest: Manifest,
        thresholds: Sequence[float],
        max_pending: int,
        compaction_threshold: float,
        places: int,
    ) -> None:
        """An empty batch.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them (2.0 = off).
            max_pending: a sequence is run through a segment when more tokens of it than this would wait before it.
            compaction_threshold: when a smaller share of the sequences in a step than this needs a segment, only those
                run it; else all that wait before it do.
            places: sequences it shall hold at once; as many of them as the networks take.

        Raises:
            GenerationError: the networks take one sequence at a time, or no memory for the sequences' buffers.
        """
        self.rows: dict[int, SegmentedRow] = {}
        self._segments = len(manifest.segment_sizes)
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._thresholds = [*thresholds, NEVER_EXIT]
        self._max_pending, self._compaction = max_pending, compaction_threshold
        self._limit = min(manifest.model.context_length or backend.capacity, backend.capacity)
        self._lane = backend.batch_lane(self, places)
        self._free = list(range(min(places, backend.max_batch_size)))
        self._used = set[int]()  # places that hold what a sequence has left

    @property
    def free(self) -> int:
        """Places left."""
        return len(self._free)

    def join(self) -> int:
        """The place of a new, empty sequence: the first, because neighbours run together."""
        place = heapq.heappop(self._free)
        if place in self._used:
            self._lane.clear([place])
            self._used.remove(place)
        self.rows[place] = SegmentedRow(self._segments)
        return place

    def leave(self, place: int) -> None:
        """Frees a place."""
        del self.rows[place]
        self._used.add(place)
        heapq.heappush(self._free, place)

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, RowResult]:
        """Runs each sequence's S >= 1 new token ids; the result is about the last of them.

        Args:
            new: token ids by place, not necessarily of all sequences.
            logits_to_keep: by place, how many of the last positions get logits where the last segment runs, at least 1;
                no more than the tokens it runs over come. The result is then that of full depth, also where the token
                could have left and only came along. A sequence without an entry leaves at its own exit whatever runs.
            full: places of sequences that are run through every segment and of which nothing exits.

        Raises:
            GenerationError: no ids, more tokens than a sequence can have, no memory for waiting tokens, or the engine
                failed. The sequences are as they were before the step.
        """
        everyone, lane, keep = sorted(new), self._lane, logits_to_keep or {}
        totals = {place: check_step(new[place], self.rows[place].lengths[0], self._limit) for place in everyone}
        ids = {place: np.asarray(new[place], np.int64) for place in everyone}
        ran: list[list[int]] = []
        left: dict[int, int] = {}  # the first segment each could leave behind
        needed = everyone
        for k, threshold in enumerate(self._thresholds):
            if k:
                waits = {place: totals[place] - self.rows[place].lengths[k] for place in needed}
                needed = still_needing(needed, left, waits, self._max_pending)
            run = runners(needed, everyone, ran[-1] if k else None, self._compaction) if needed else []
            if k:
                stays = set(ran[-1]) - set(run)
                lane.wait(k, {place: self.rows[place].waiting(k) for place in sorted(stays)})
            if not run:
                break
            lengths = [self.rows[place].lengths[k] if place in self.rows else 0 for place in range(lane.rows)]
            waited = {place: self.rows[place].waiting(k) for place in run}
            lane.run(k, {place: totals[place] - lengths[place] for place in run}, lengths, waited, ids, threshold)
            ran.append(run)
            leaving = self._leaving(k, run, left, keep, full)
            left |= dict.fromkeys(leaving, k)
            lane.leave(leaving)
        rows = lane.logits()
        for k, places in enumerate(ran):
            for place in places:
                self.rows[place].lengths[k] = totals[place]
        return {
            place: RowResult(
                rows[place][-1], rows[place], self._depths[left[place]], sum(place in places for places in ran)
            )
            for place in everyone
        }

    def _leaving(
        self, k: int, run: list[int], left: Collection[int], keep: Mapping[int, int], full: Collection[int]
    ) -> dict[int, int]:
        """Who of `run` leaves segment k, which it has just been run through, and how many of its last tokens do."""
        if k + 1 == self._segments:
            return {place: keep.get(place, 1) for place in run if place not in left or place in keep}
        verdicts = self._lane.verdicts()
        return {place: 1 for place in run if verdicts[place] and place not in left and place not in full}
