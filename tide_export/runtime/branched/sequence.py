"""One sequence on the branched graph: its K/V buffers, its pending hidden states, and its step.

The graph decides what exits and which segments run; this module binds its memory. K/V buffers are bound as input and
output at once, so that the graph writes new keys in place and a skipped segment costs nothing; they grow by doubling.
Any number of sequences share one session.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.errors import GenerationError, first_line
from tide_export.runtime.onnxruntime.bindings import Binding, import_onnxruntime
from tide_export.runtime.onnxruntime.kv_buffers import KvBuffers
from tide_export.runtime.packed.sequence import LoneSequence
from tide_export.runtime.sequence import NO_LIMIT, ROOM, StepResult
from tide_export.thresholds.resolve import MAX_THRESHOLD, NEVER_EXIT


class BranchedSequence(LoneSequence):
    """K/V buffers and pending hidden states of one sequence, bound once to one ONNX Runtime session."""

    def __init__(
        self,
        session: Any,
        manifest: Manifest,
        thresholds: Sequence[float],
        max_pending: int,
        room: int = ROOM,
        kv: KvBuffers | None = None,
    ) -> None:
        """An empty sequence; see `Backend.start`. `kv`: another sequence's buffers, where it is to go on."""
        super().__init__(len(manifest.segment_sizes))
        ort = import_onnxruntime()
        self._ort, self._session = ort, session
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._model = manifest.model
        self._kv, self._bound_capacity = KvBuffers(ort, manifest, room) if kv is None else kv, 0
        self._propagates = manifest.kv_cache_strategy == PROPAGATE
        self._ran = list(self.lengths)
        self._unfinished: Any = None  # `save` before a step that an exception ended
        self._binding = Binding(ort, session)

        self._pending_names = [] if self._propagates else [names.pending(k + 1) for k in range(len(thresholds))]
        self._no_states = np.zeros((0, manifest.model.hidden_size), np.float32)
        self._nothing = ort.OrtValue.ortvalue_from_numpy(self._no_states[None])
        self._pending = [self._nothing] * len(self._pending_names)  # before segment 1, 2, ... K-1
        for name in self._pending_names:
            self._binding.io.bind_ortvalue_input(name, self._nothing)
        self._pending_output_empty = False  # whether the bound output of pending states has no tokens
        # Outputs of unknown size first: `get_outputs` follows the order of the first binding.
        if self._pending_names:
            self._binding.io.bind_output(names.NEW_PENDING)
        self._logits = np.zeros((1, manifest.model.vocab_size), np.float32)
        self._logits_count = 0  # positions that the binding is set up for
        self._bind_logits(1)

        self._one_id = np.zeros((1, 1), np.int64)
        self._one_id_bound = False
        self._total = self._binding.input(names.TOTAL_LENGTH, np.zeros((), np.int32))
        self._thresholds = _Thresholds(thresholds, NO_LIMIT if self._propagates else max_pending)
        self._scores = np.empty((1, len(thresholds)), np.float32)
        if thresholds:
            self._thresholds.bind(self._binding)
            self._binding.output(names.SCORES, self._scores)

    @property
    def capacity(self) -> int:
        """Tokens the K/V buffers can hold before they grow."""
        return self._kv.capacity

    @property
    def computed(self) -> list[int]:
        """Tokens of the sequence that each segment has run over."""
        return self._ran if self._propagates else self.lengths

    @property
    def pending_states(self) -> list[np.ndarray]:
        # `numpy` gives a view, whose memory the next step may free.
        pending = [self._no_states if value is self._nothing else value.numpy()[0].copy() for value in self._pending]
        return [self._no_states, *pending] if pending else [self._no_states] * len(self.lengths)

    def resume(self, lengths: Sequence[int], computed: Sequence[int], pending_states: Sequence[np.ndarray]) -> None:
        if self._unfinished is not None:
            self.restore(self._unfinished)
        self.lengths, self._ran = list(lengths), list(computed)
        for k, states in enumerate(pending_states[1 : len(self._pending) + 1]):
            value = self._ort.OrtValue.ortvalue_from_numpy(states[None]) if len(states) else self._nothing
            self._set_pending(k, value)

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        self._thresholds.replace(thresholds)

    def save(self) -> Any:
        return self.lengths, self._ran, self._pending

    def restore(self, saved: Any) -> None:
        """See `SingleSequence.restore`. Keys and values beyond the lengths are overwritten before they are read."""
        self._unfinished = saved
        self.lengths, self._ran, self._pending = saved
        # What is bound may be of any moment of a step: all of it is bound anew, here or by the next step.
        for name, value in zip(self._pending_names, self._pending, strict=True):
            self._binding.io.bind_ortvalue_input(name, value)
        self._bound_capacity = 0
        self._one_id_bound = self._pending_output_empty = False
        self._logits_count = 0
        self._thresholds.invalidate()
        self._unfinished = None

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        if self._unfinished is not None:
            self.restore(self._unfinished)
        self._unfinished = self.save()
        count, total = len(ids), self._kv.reserve(len(ids), self.lengths)
        if self._kv.capacity != self._bound_capacity:
            self._bind_kv()
        if count > 1:
            self._binding.input(names.INPUT_IDS, np.array(ids, np.int64)[None])
            self._one_id_bound = False
        else:
            self._one_id[0, 0] = ids[0]
            if not self._one_id_bound:
                self._binding.input(names.INPUT_IDS, self._one_id)
                self._one_id_bound = True
        self._total[()] = total
        thresholds, binding = self._thresholds, self._binding.io
        thresholds.force(total, self.lengths, full or (self._propagates and (count > 1 or total == 1)))
        keep = min(logits_to_keep, total - self.lengths[-1])  # all that the last segment may run over
        if keep != self._logits_count or keep > 1:
            self._bind_logits(keep)
        if self._pending_names and (thresholds.may_pend or not self._pending_output_empty):
            binding.bind_output(names.NEW_PENDING)  # a bound value would pin the last step's shape
            self._pending_output_empty = False
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise GenerationError(f"ONNX Runtime failed at token {total}: {first_line(error)}") from error
        scores = self._scores[0].tolist()
        segments_run = 1 + _first_above(scores, thresholds.skips)
        lengths = [total if k < segments_run else length for k, length in enumerate(self.lengths)]
        if self._propagates:
            lengths = [total] * len(lengths)
            self._ran = [ran + count if k < segments_run else ran for k, ran in enumerate(self._ran)]
        else:
            self._take_pending(segments_run)
        rows = self._logits if keep == 1 else self._output(bool(self._pending_names)).numpy()
        exit_layer = self._depths[_first_above(scores, thresholds.exits)]
        result = StepResult(rows[-1], rows, exit_layer, segments_run, self._scores[0])
        self.lengths, self._unfinished = lengths, None
        return result

    def rewind(self, length: int) -> None:
        if self._unfinished is not None:
            self.restore(self._unfinished)
        if self._propagates and 0 <= length < self.lengths[0]:
            raise GenerationError("a sequence whose K/V are propagated cannot be rewound")
        self._unfinished = self.save()
        before = self.lengths
        super().rewind(length)
        for k, deep in enumerate(before[1:]):
            if before[k] > length and self._pending[k] is not self._nothing:
                left = max(length - deep, 0)
                states = self._pending[k].numpy()[:, :left].copy()  # the old value frees its memory
                self._set_pending(k, self._ort.OrtValue.ortvalue_from_numpy(states) if left else self._nothing)
        self._unfinished = None

    def _bind_logits(self, count: int) -> None:
        """One position's logits go to `_logits`; how many more there will be is known when the last segment runs."""
        if count != self._logits_count:
            positions = np.arange(-count, 0, dtype=np.int64)
            self._binding.input(names.LOGITS_POSITIONS, np.stack([np.zeros_like(positions), positions], axis=1))
        if count > 1:
            self._binding.io.bind_output(names.LOGITS)
        elif self._logits_count != 1:
            self._binding.output(names.LOGITS, self._logits)
        self._logits_count = count

    def _output(self, index: int) -> Any:
        """An OrtValue of unknown size: first the new pending states, where there are checkpoints, then the logits."""
        return self._ort.OrtValue(self._binding.io.get_outputs_as_ortvaluevector()[index])

    def _take_pending(self, segments_run: int) -> None:
        """Binds the pending output of this step as the pending input of the next; nothing is copied.

        Segments that ran have nothing pending; of those that did not, only the first got new states.
        """
        for k in range(segments_run - 1):
            if self._pending[k] is not self._nothing:
                self._set_pending(k, self._nothing)
        if segments_run < len(self.lengths):
            self._set_pending(segments_run - 1, self._output(0))
        else:
            self._pending_output_empty = True

    def _set_pending(self, k: int, value: Any) -> None:
        self._pending = [*self._pending[:k], value, *self._pending[k + 1 :]]  # `save` keeps the old list
        self._binding.io.bind_ortvalue_input(self._pending_names[k], value)

    def _bind_kv(self) -> None:
        for (layer, kind), value in self._kv.values.items():
            self._binding.io.bind_ortvalue_input(names.past(layer, kind), value)
            self._binding.io.bind_ortvalue_output(names.present(layer, kind), value)
        self._bound_capacity = self._kv.capacity


class _Thresholds:
    """The thresholds of exits and of skipped segments, in the arrays that the graph reads.

    Attributes:
        exits, skips: as the graph compares them with scores, rounded to float32.
        may_pend: whether a score could be above one of `skips`; if not, nothing is newly pending after the step.
    """

    def __init__(self, thresholds: Sequence[float], max_pending: int) -> None:
        self._wanted = np.array(thresholds, np.float32)
        self._exit_array, self._skip_array = self._wanted.copy(), self._wanted.copy()
        self._max_pending = max_pending
        self._forced_from = -1  # checkpoints from this one on have a forced skip threshold; -1: none written yet
        self._full = False
        self.exits, self.skips = list[float](), list[float]()
        self.may_pend = True

    def bind(self, binding: Binding) -> None:
        binding.input(names.THRESHOLDS, self._exit_array)
        for k in range(len(self._wanted)):
            binding.input(names.skip_threshold(k + 1), self._skip_array[k : k + 1])

    def replace(self, thresholds: Sequence[float]) -> None:
        """Uses other thresholds from the next step on."""
        wanted = np.array(thresholds, np.float32)
        if not np.array_equal(wanted, self._wanted):
            self.invalidate()
            self._wanted[:] = wanted

    def invalidate(self) -> None:
        """Has the next step write its thresholds, whatever the last one's were."""
        self._forced_from = -1

    def force(self, total: int, lengths: Sequence[int], full: bool) -> None:
        """Writes the thresholds of a step to `total` tokens, where they are not those of the last step.

        How many tokens would be pending is known before the step; deeper segments have at least as many, so those
        forced are the deepest. `full`: nothing exits.
        """
        forced = len(self._wanted)
        while forced and total - lengths[forced] > self._max_pending:
            forced -= 1
        if len(self._wanted) and (forced != self._forced_from or full != self._full):
            self._exit_array[:] = NEVER_EXIT if full else self._wanted
            self._skip_array[:] = self._exit_array
            np.maximum(self._skip_array[forced:], MAX_THRESHOLD, out=self._skip_array[forced:])  # still scored
            self.exits, self.skips = self._exit_array.tolist(), self._skip_array.tolist()
            self._forced_from, self._full = forced, full
            self.may_pend = bool((self._skip_array < 1).any())


def _first_above(scores: Sequence[float], thresholds: Sequence[float]) -> int:
    """Number of the first checkpoint whose score is above its threshold (NaN is not), else how many there are."""
    for number, (score, threshold) in enumerate(zip(scores, thresholds, strict=True)):
        if score > threshold:
            return number
    return len(scores)
