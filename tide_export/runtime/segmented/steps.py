"""A step of some sequences over networks of one segment each: after every router, `depth_rule` selects which go on.

The same rule as in the graph of `compose.step_graph`, in Python. `memory` holds the buffers and runs the networks.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tide_export import names
from tide_export.bundle.engine_fields import NetworksInfo
from tide_export.bundle.manifest import Manifest
from tide_export.runtime.decoding.depth_rule import active_slots, scheduled_slots
from tide_export.runtime.segmented.head import Row
from tide_export.runtime.segmented.memory import SegmentBuffers, SlotRun
from tide_export.runtime.sequence import (
    NO_LOGITS,
    NO_SCORES,
    Candidates,
    ExitRule,
    SequenceState,
    StepResult,
    check_step,
)
from tide_export.thresholds.resolve import NEVER_EXIT

SURE = 1.0  # no score is above it

Ids = Sequence[int] | np.ndarray
Logits = np.ndarray | list[Candidates]  # of some positions of a sequence


class SegmentedSteps:
    """Steps the sequences in the slots of some buffers.

    Attributes:
        capacity: tokens a sequence can have.
    """

    def __init__(self, buffers: SegmentBuffers, manifest: Manifest, info: NetworksInfo) -> None:
        self.capacity = min(manifest.model.context_length or info.capacity, info.capacity)
        self.buffers, self._max_tokens = buffers, info.max_tokens
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._last = len(self._depths) - 1
        # What is pending before all segments must fit a run with the next token, and a buffer with the states of a run.
        of_each = (info.max_tokens - 1) // max(1, self._last)
        self._max_pending = min(of_each, info.state_rows - info.max_tokens)

    def step(
        self,
        sequences: Mapping[int, SequenceState],
        rules: Mapping[int, ExitRule],
        new: Mapping[int, Ids],
        keep: Mapping[int, int],
        full: Collection[int],
        compaction_threshold: float = 1.0,
        alone: bool = False,
    ) -> dict[int, StepResult]:
        """See `sequence.Batch.step`.

        Args:
            sequences, rules: by slot.
            alone: as in `sequence.SingleSequence.step`: a token that can exit does so in spite of `keep`, and the
                results are views of buffers and have scores.
        """
        everyone, buffers, last = sorted(new), self.buffers, self._last
        totals = {slot: check_step(new[slot], sequences[slot].length, self.capacity) for slot in everyone}
        buffers.busy = True
        none = [0] * len(self._depths)
        held = [sequences[slot].lengths if slot in sequences else none for slot in range(buffers.slots)]
        before = [list(each) for each in zip(*held, strict=True)]  # by segment, of every slot
        lengths, ids, parts = [list(each) for each in before], dict[int, np.ndarray](), dict[int, list[Logits]]()
        first = {slot: totals[slot] - keep.get(slot, 1) for slot in everyone}  # position that gets logits
        for slot in everyone:
            parts[slot] = self._first_parts(slot, sequences[slot], np.asarray(new[slot]), first[slot], lengths)
            ids[slot] = np.asarray(new[slot])[lengths[0][slot] - before[0][slot] :]
        starts = list(lengths[last])
        max_pending = {slot: min(rules[slot].max_pending, self._max_pending) for slot in everyone}
        exits, active, ran = dict[int, int](), everyone, list[list[int]]()
        for k in range(last + 1):
            if k:
                active = active_slots(ran[-1], exits, {s: totals[s] - before[k][s] for s in ran[-1]}, max_pending)
            run = scheduled_slots(active, everyone, ran[-1] if k else None, compaction_threshold) if active else []
            if not run:
                break
            may_exit = [slot for slot in run if k < last and slot not in exits and slot not in full]
            limits = {slot: rules[slot].thresholds[k] for slot in may_exit}
            self._run(k, {slot: totals[slot] for slot in run}, limits, lengths, ids)
            ran.append(run)
            if any(limit < SURE for limit in limits.values()):
                exits |= dict.fromkeys(buffers.exits(), k)
        deep = ran[last] if len(ran) > last else []
        rows = {}
        for slot in everyone:
            if slot in exits and (alone or slot not in keep or slot not in deep):
                rows[slot] = [(slot, names.EXIT_ROW)]
            else:
                exits[slot] = last
                kept = range(max(first[slot], starts[slot]), totals[slot])
                rows[slot] = [(slot, names.FINAL_ROW + position - starts[slot]) for position in kept]
        logits = self._logits(rows, sequences, alone)
        scores = self._scores(len(ran)) if alone else NO_SCORES
        results = {}
        for slot in everyone:
            segments_run = sum(slot in slots for slots in ran)
            sequences[slot].lengths[:segments_run] = [totals[slot]] * segments_run
            pieces = [*(parts[slot] if exits[slot] == last else ()), logits[slot]]
            results[slot] = _result(pieces, self._depths[exits[slot]], segments_run, scores)
        buffers.busy = False
        return results

    def _run(
        self,
        k: int,
        totals: Mapping[int, int],
        limits: Mapping[int, float],
        lengths: list[list[int]],
        ids: Mapping[int, np.ndarray],
    ) -> None:
        """Runs segment k over some slots up to `totals` tokens, and changes its `lengths`."""
        slots = {
            slot: SlotRun(total - lengths[k][slot], limits.get(slot, NEVER_EXIT), ids[slot])
            for slot, total in totals.items()
        }
        self.buffers.run(k, slots, lengths[k], lengths[min(k + 1, self._last)])
        for slot, total in totals.items():
            lengths[k][slot] = total

    def _first_parts(
        self, slot: int, sequence: SequenceState, ids: np.ndarray, first: int, lengths: list[list[int]]
    ) -> list[Logits]:
        """Runs what is too much for one run through all segments, part by part, but for the last part. Returns the
        logits of the tokens from position `first` on that it ran over."""
        parts, last, begin = list[Logits](), self._last, sequence.length
        while begin + len(ids) - (start := lengths[last][slot]) > self._max_tokens:
            stop = start + self._max_tokens
            new = ids[lengths[0][slot] - begin : stop - begin]
            for k in range(last + 1):
                self._run(k, {slot: stop}, {}, lengths, {slot: new})
            # The next part's states take the place of those that were pending, which are not any more if it fails.
            sequence.lengths = [begin] * len(sequence.lengths)
            kept = [(slot, names.FINAL_ROW + position - start) for position in range(max(first, start), stop)]
            if kept:
                parts.append(self._logits({slot: kept}, {slot: sequence}, False)[slot])
        return parts

    def _logits(
        self, rows: Mapping[int, Sequence[Row]], sequences: Mapping[int, SequenceState], alone: bool
    ) -> dict[int, Logits]:
        """The head on `rows` of each slot; `alone`: where it gives all logits, in a view of a buffer."""
        needs = {slot: self.buffers.head.count(sequences[slot].candidates) for slot in rows}
        whole = [row for slot, each in rows.items() if not needs[slot] for row in each]
        few = [(row, needs[slot]) for slot, each in rows.items() if needs[slot] for row in each]
        found, candidates = self.buffers.logits(whole, [row for row, _ in few], [count for _, count in few])
        found, logits, start, taken = found if alone else found.copy(), dict[int, Logits](), 0, 0
        for slot, each in rows.items():
            if needs[slot]:
                logits[slot] = candidates[taken : taken + len(each)]
                taken += len(each)
            else:
                logits[slot] = found[start : start + len(each)]
                start += len(each)
        return logits

    def _scores(self, ran: int) -> np.ndarray:
        """Of the only slot, once logits have been read: NaN where the router was not reached."""
        scores = np.full(self._last, np.nan, np.float32)
        for k in range(min(ran, self._last)):
            scores[k] = self.buffers.score(k)
        return scores


def _result(pieces: Sequence[Logits], exit_layer: int, segments_run: int, scores: np.ndarray) -> StepResult:
    """Of consecutive positions; the head gives the same kind of logits for all of them."""
    found = [candidate for piece in pieces if isinstance(piece, list) for candidate in piece]
    if found:
        return StepResult(NO_LOGITS, NO_LOGITS, exit_layer, segments_run, scores, found)
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    logits = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    return StepResult(logits[-1], logits, exit_layer, segments_run, scores)
