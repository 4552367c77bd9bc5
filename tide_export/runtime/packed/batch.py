"""The step over several sequences: after every segment, `depth_rule` selects which of them run the next one."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import accumulate

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError, first_line
from tide_export.runtime.decoding.depth_rule import active_slots, scheduled_slots
from tide_export.runtime.onnxruntime.bindings import import_onnxruntime
from tide_export.runtime.onnxruntime.kv_buffers import KvBuffers
from tide_export.runtime.packed.networks import BatchSessions, layers_of
from tide_export.runtime.packed.segment import SegmentRun
from tide_export.runtime.packed.sequence import LoneSequence, PackedSequence
from tide_export.runtime.sequence import NO_LIMIT, ExitRule, StepResult
from tide_export.thresholds.resolve import NEVER_EXIT

StartAlone = Callable[[Sequence[float], int, KvBuffers], LoneSequence]  # thresholds, max_pending, the K/V buffers


class SlotStep:
    """One sequence in one step.

    Attributes:
        total: tokens of the sequence after the step.
        states: input of the next segment: token ids int64 [n], then hidden states float32 [n, D], pending ones first.
        segments_run: so far.
        exit_segment: the segment that the token exited after.
        exit_states: float32 [m, D'], the head's input.
    """

    exit_segment: int
    exit_states: np.ndarray
    __slots__ = ("exit_segment", "exit_states", "segments_run", "sequence", "states", "total")

    def __init__(self, sequence: PackedSequence, ids: np.ndarray) -> None:
        self.sequence, self.states, self.total = sequence, ids, sequence.lengths[0] + len(ids)
        self.segments_run = 0


class PackedBatch:
    """Sequences in `sessions.slots` slots, and the buffers of their steps. See `sequence.KvBatch`.

    Attributes:
        sequences: by slot.
    """

    def __init__(
        self,
        sessions: BatchSessions,
        manifest: Manifest,
        compaction_threshold: float,
        start_alone: StartAlone | None = None,
    ) -> None:
        """An empty batch; see `Backend.start_batch`.

        Args:
            start_alone: how a step of one sequence is run faster than on `sessions`; None: it is not.
        """
        self._ort = import_onnxruntime()
        self._manifest, self._head = manifest, sessions.head
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._compaction, self._rules = compaction_threshold, dict[int, ExitRule]()
        self.sequences: dict[int, PackedSequence] = {}
        self._free = list(range(sessions.slots))[::-1]
        self._padding = PackedSequence(self._ort, manifest)
        self._padding.kv.allocate(1, self._padding.lengths)
        self._start_alone, self._alone = start_alone, dict[int, LoneSequence]()
        self._bound = dict[int, int]()  # capacity of the buffers bound to a slot; without an entry padding is
        widths = (manifest.model.hidden_size, sessions.exit_size)
        self._segments = [
            SegmentRun(
                self._ort,
                session,
                k,
                layers_of(manifest, k),
                manifest.model.kv_read(layers_of(manifest, k)),
                sessions.slots,
                self._padding,
                widths,
                last=k + 1 == len(sessions.segments),
            )
            for k, session in enumerate(sessions.segments)
        ]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def join(self, thresholds: Sequence[float], max_pending: int) -> int:
        slot = self._free.pop()
        self._rules[slot] = ExitRule.of(thresholds, max_pending)
        self.sequences[slot] = PackedSequence(self._ort, self._manifest)
        return slot

    def leave(self, slot: int) -> None:
        """Frees a slot and the buffers of its sequence."""
        del self.sequences[slot], self._rules[slot]
        self._alone.pop(slot, None)
        self._free.append(slot)
        if self._bound.pop(slot, None) is not None:
            self._bind(slot, self._padding)

    def read_kv(self, slot: int, start: int, stop: int) -> np.ndarray:
        return self.sequences[slot].read_kv(start, stop)

    def write_kv(self, slot: int, blocks: Sequence[np.ndarray], length: int) -> None:
        self.sequences[slot].write_kv(blocks, length)

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, StepResult]:
        keep = logits_to_keep or {}
        if len(new) == 1 and self._start_alone is not None:
            ((slot, ids),) = new.items()
            # A sequence alone returns the logits of its exit even where the last segment had to run.
            if slot not in keep or slot in full or self._rules[slot].max_pending == NO_LIMIT:
                return {slot: self._step_alone(self._start_alone, slot, ids, keep.get(slot, 1), slot in full)}
        return self._step_all(new, keep, full)

    def _step_all(
        self, new: Mapping[int, Sequence[int] | np.ndarray], keep: Mapping[int, int], full: Collection[int]
    ) -> dict[int, StepResult]:
        """As `step`, on the batch's networks."""
        steps = self._begin(new)
        everyone = scheduled = list(steps)
        exited, previous = set[int](), None
        max_pending = {slot: self._rules[slot].max_pending for slot in everyone}
        for k, segment in enumerate(self._segments):
            active = everyone
            if k > 0:
                pending = {slot: steps[slot].total - steps[slot].sequence.lengths[k] for slot in scheduled}
                active = active_slots(scheduled, exited, pending, max_pending)
                if not active:
                    break
            scheduled = scheduled_slots(active, everyone, previous, self._compaction)
            running = [steps[slot] for slot in scheduled]
            counts, deepest = [len(one.states) for one in running], k + 1 == len(self._segments)
            positions = [1] * len(running)
            if deepest:
                positions = [min(keep.get(slot, 1), n) for slot, n in zip(scheduled, counts, strict=True)]
            entry = self._entry(k, running, counts, whole=scheduled == previous)
            thresholds = [] if deepest else self._thresholds(k, scheduled, exited.union(full))
            segment.run(scheduled, counts, [one.total for one in running], positions, entry, thresholds)
            flags = [slot not in exited or slot in keep for slot in scheduled] if deepest else segment.exits(thresholds)
            stop = 0
            for slot, one, count, flag in zip(scheduled, running, positions, flags, strict=True):
                stop += count
                one.segments_run += 1
                if flag:
                    exited.add(slot)
                    one.exit_segment, one.exit_states = k, segment.states[stop - count : stop].copy()
            if not deepest:
                _advance(running, counts, segment.hidden[0], k + 1)
            previous = scheduled
        results = self._results(steps)
        for one in steps.values():
            _commit(one)
        return results

    def _step_alone(
        self, start: StartAlone, slot: int, ids: Sequence[int] | np.ndarray, keep: int, full: bool
    ) -> StepResult:
        sequence = self.sequences[slot]
        if slot not in self._alone:
            rule = self._rules[slot]
            self._alone[slot] = start(rule.thresholds, rule.max_pending, sequence.kv)
        return sequence.step_alone(self._alone[slot], ids, keep, full)

    def _thresholds(self, k: int, slots: Sequence[int], never: Container[int]) -> list[float]:
        """For each slot's score after segment k; those in `never` do not exit."""
        return [NEVER_EXIT if slot in never else self._rules[slot].thresholds[k] for slot in slots]

    def _begin(self, new: Mapping[int, Sequence[int] | np.ndarray]) -> dict[int, SlotStep]:
        """Makes room for the new tokens; the steps of their sequences by slot, ascending."""
        steps = {slot: SlotStep(self.sequences[slot], np.asarray(new[slot], np.int64)) for slot in sorted(new)}
        for slot, one in steps.items():
            kv = one.sequence.kv
            kv.reserve(len(one.states), one.sequence.lengths)
            if self._bound.get(slot) != kv.capacity:
                self._bind(slot, one.sequence)
                self._bound[slot] = kv.capacity
        return steps

    def _entry(self, k: int, running: Sequence[SlotStep], counts: Sequence[int], whole: bool) -> np.ndarray:
        """The concatenated inputs of segment k, [1, N] or [1, N, D]; `whole`: of all that ran the segment before."""
        if whole and k > 0:
            hidden = self._segments[k - 1].hidden
            if sum(counts) == len(hidden[0]):  # nothing was pending
                return hidden
        return np.concatenate([one.states for one in running])[None]

    def _results(self, steps: Mapping[int, SlotStep]) -> dict[int, StepResult]:
        """Runs the head on the exit states."""
        states = [one.exit_states for one in steps.values()]
        logits = self._logits(np.concatenate(states)[None])
        stops = accumulate(map(len, states))
        return {
            slot: StepResult(
                logits[stop - 1], logits[stop - len(kept) : stop], self._depths[one.exit_segment], one.segments_run
            )
            for (slot, one), kept, stop in zip(steps.items(), states, stops, strict=True)
        }

    def _logits(self, states: np.ndarray) -> np.ndarray:
        """float32 [m, V] of exit states [1, m, D']."""
        try:
            return self._head.run([names.LOGITS], {names.EXIT_STATES: states})[0][0]
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise GenerationError(f"ONNX Runtime failed in the head: {first_line(error)}") from error

    def _bind(self, slot: int, sequence: PackedSequence) -> None:
        for segment in self._segments:
            segment.bind(slot, sequence)


def _advance(running: Sequence[SlotStep], counts: Sequence[int], hidden: np.ndarray, k: int) -> None:
    """Sets the inputs of segment k: views of the output `hidden` [N, D] of the last, after any pending states."""
    stop = 0
    for one, count in zip(running, counts, strict=True):
        stop += count
        one.states, pending = hidden[stop - count : stop], one.sequence.pending_states[k]
        if len(pending):
            one.states = np.concatenate([pending, one.states])


def _commit(step: SlotStep) -> None:
    """Updates the sequence at the end of a step, when nothing can fail any more."""
    sequence, ran = step.sequence, step.segments_run
    for k in range(ran):
        sequence.lengths[k] = step.total
        if len(sequence.pending_states[k]):
            sequence.pending_states[k] = sequence.pending_states[k][:0].copy()
    if ran < len(sequence.lengths):
        sequence.pending_states[ran] = step.states.copy()  # the next run overwrites the array
