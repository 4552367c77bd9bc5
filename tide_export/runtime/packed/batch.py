"""The state machine of a step over several sequences: after every segment, which of them go on, as `rule` says."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.decoding.depth_rule import RowResult, runners, still_needing
from tide_export.runtime.onnxruntime.session import first_line, import_onnxruntime
from tide_export.runtime.packed.networks import BatchSessions, layers_of
from tide_export.runtime.packed.row import Row
from tide_export.runtime.packed.segment import SegmentRun


class Batch:
    """Sequences at `sessions.rows` places, and the buffers of their steps. Serves one thread at a time.

    Attributes:
        rows: the sequences, by place.
    """

    def __init__(
        self,
        sessions: BatchSessions,
        manifest: Manifest,
        thresholds: Sequence[float],
        max_pending: int,
        compaction_threshold: float,
    ) -> None:
        """An empty batch.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them (2.0 = off).
            max_pending: a sequence is run through a segment when more tokens of it than this would wait before it.
            compaction_threshold: when a smaller share of the sequences in a step than this needs a segment, only those
                run it; else all that wait before it do.
        """
        self._ort = import_onnxruntime()
        self._manifest, self._head, self._exit_size = manifest, sessions.head, sessions.exit_size
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._thresholds = np.array(thresholds, np.float32)
        self._max_pending, self._compaction = max_pending, compaction_threshold
        self.rows: dict[int, Row] = {}
        self._free = list(range(sessions.rows))[::-1]
        self._nobody = Row(self._ort, manifest)
        self._nobody.allocate(1)
        widths = (manifest.model.hidden_size, self._exit_size)
        self._segments = [
            SegmentRun(
                self._ort,
                session,
                k,
                layers_of(manifest, k),
                sessions.rows,
                self._nobody,
                widths,
                last=k + 1 == len(sessions.segments),
            )
            for k, session in enumerate(sessions.segments)
        ]

    @property
    def free(self) -> int:
        """Places left."""
        return len(self._free)

    def join(self) -> int:
        """The place of a new, empty sequence."""
        place = self._free.pop()
        self.rows[place] = Row(self._ort, self._manifest)
        return place

    def leave(self, place: int) -> None:
        """Frees a place and the buffers of its sequence."""
        del self.rows[place]
        self._free.append(place)
        self._bind(place, self._nobody)

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
            GenerationError: no ids, more tokens than the model's context holds, no memory for their K/V, or ONNX
                Runtime failed. The sequences are as they were before the step.
        """
        everyone, totals, flat = self._take(new)
        keep = logits_to_keep or {}
        arrived = {place: len(new[place]) for place in everyone}  # tokens each brings to the segment
        entry, ran = flat, [list[int]() for _ in self._segments]
        left: dict[int, tuple[int, np.ndarray]] = {}  # the first checkpoint each could leave at, and its states there
        doors: dict[tuple[int, int], np.ndarray] = {}  # what waits before a segment now, by segment and place
        needed = everyone
        for k, segment in enumerate(self._segments):
            if k > 0:
                doors |= {(k, place): states for place, states in self._at_door(k, ran[k - 1], arrived).items()}
                waits = {place: totals[place] - self.rows[place].lengths[k] for place in needed}
                needed = still_needing(needed, left, waits, self._max_pending)
                if not needed:
                    break
            ran[k] = runners(needed, everyone, ran[k - 1] if k else None, self._compaction)
            if k > 0:
                arrived, entry = self._enter(k, ran[k], ran[k - 1], doors)
            deepest = k + 1 == len(self._segments)
            asked = [min(keep.get(place, 1), arrived[place]) if deepest else 1 for place in ran[k]]
            segment.run(ran[k], [arrived[p] for p in ran[k]], [totals[p] for p in ran[k]], asked, entry)
            for index, (place, stop) in enumerate(zip(ran[k], accumulate(asked), strict=True)):
                leaves = deepest or (segment.scores[index] > self._thresholds[k] and place not in full)
                if leaves and (place not in left or (deepest and place in keep)):
                    left[place] = (k, segment.states[0, stop - asked[index] : stop].copy())
        counts = [len(left[place][1]) for place in everyone]
        logits = self._logits(np.concatenate([left[place][1] for place in everyone])[None])
        self._commit(ran, totals, doors)
        return {
            place: RowResult(
                logits[stop - 1],
                logits[stop - count : stop],
                self._depths[left[place][0]],
                sum(place in places for places in ran),
            )
            for place, count, stop in zip(everyone, counts, accumulate(counts), strict=True)
        }

    def _take(self, new: Mapping[int, Sequence[int] | np.ndarray]) -> tuple[list[int], dict[int, int], np.ndarray]:
        """Makes room for new tokens. Gives the places in the step, how many tokens each has behind it, and the new ids
        of all, int64 [1, N]."""
        everyone = sorted(new)
        totals = {place: self.rows[place].lengths[0] + len(new[place]) for place in everyone}
        for place in everyone:
            if self.rows[place].reserve(len(new[place])):
                self._bind(place, self.rows[place])
        return everyone, totals, np.concatenate([np.asarray(new[place], np.int64) for place in everyone])[None]

    def _at_door(self, k: int, came: list[int], counts: Mapping[int, int]) -> dict[int, np.ndarray]:
        """All that waits before segment k of those that ran the segment before: what waited, and what is new. Where
        nothing waited, a view of that segment's output."""
        hidden, found, start = self._segments[k - 1].hidden[0], {}, 0
        for place in came:
            stop = start + counts[place]
            waited = self.rows[place].waiting[k]
            found[place] = np.concatenate([waited, hidden[start:stop]]) if len(waited) else hidden[start:stop]
            start = stop
        return found

    def _enter(
        self, k: int, places: list[int], came: list[int], doors: Mapping[tuple[int, int], np.ndarray]
    ) -> tuple[dict[int, int], np.ndarray]:
        """Tokens each of `places` brings to segment k, and their hidden states [1, N, D]."""
        parts = [doors[k, place] for place in places]
        counts = {place: len(part) for place, part in zip(places, parts, strict=True)}
        before = self._segments[k - 1].hidden
        if places == came and sum(counts.values()) == len(before[0]):  # all of it, and nothing waited
            return counts, before
        return counts, np.concatenate(parts)[None]

    def _commit(
        self, ran: list[list[int]], totals: Mapping[int, int], doors: Mapping[tuple[int, int], np.ndarray]
    ) -> None:
        """Writes down how far everyone has come and what waits now, once nothing can fail any more."""
        for k, places in enumerate(ran):
            for place in places:
                row = self.rows[place]
                row.lengths[k] = totals[place]
                if len(row.waiting[k]):
                    row.waiting[k] = row.waiting[k][:0].copy()
        for (k, place), states in doors.items():
            if place not in ran[k]:
                self.rows[place].waiting[k] = states.copy()  # of arrays that the next run writes over

    def _bind(self, place: int, row: Row) -> None:
        for segment in self._segments:
            segment.bind_row(place, row)

    def _logits(self, states: np.ndarray) -> np.ndarray:
        """float32 [m, V] of exit states [1, m, D']."""
        try:
            return self._head.run([names.LOGITS], {names.EXIT_STATES: states})[0][0]
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            raise GenerationError(f"ONNX Runtime failed in the head: {first_line(error)}") from error
