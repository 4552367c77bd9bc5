"""One sequence in flight: its K/V buffers, the hidden states waiting between segments, and the step that moves it on.

`Engine` makes one `SequenceState` per generation and calls `step` with the prompt, then with one token at a time. What
exits and which segments run is decided in the graph; this module only lends it memory. K/V buffers are bound as input
and output at once, so that the graph writes new keys in place and a skipped segment costs nothing; they grow by
doubling. A state serves one thread at a time; any number of states share one session.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.onnxruntime.session import first_line, import_onnxruntime

ROOM = 128  # tokens of K/V buffer beyond the prompt before the first growth
NO_LIMIT = 2**62  # more tokens than can ever wait
FORCED = 2.0  # a threshold that no score is above


class StepResult(NamedTuple):
    """What one step says about its last token. The arrays are the state's own and change with the next step."""

    logits: np.ndarray  # float32 [V]
    rows: np.ndarray  # float32 [m, V], of the last m positions; one unless more were asked for and the last segment ran
    exit_layer: int  # layers the logits' hidden state went through; the model's depth when it did not exit
    segments_run: int  # segments 0 .. this-1 ran in this step
    scores: np.ndarray  # float32 [K-1], NaN where the router was not reached


def check_step(ids: Sequence[int] | np.ndarray, length: int, limit: int | None) -> int:
    """Tokens of the sequence after a step over `ids` behind `length` tokens.

    Raises:
        GenerationError: no ids, or more tokens than `limit`, the model's context.
    """
    total = length + len(ids)
    if total == length:
        raise GenerationError("a step needs at least one token")
    if limit is not None and total > limit:
        raise GenerationError(f"the sequence would have {total} tokens but the model's context holds {limit}")
    return total


def check_rewind(tokens: int, length: int) -> None:
    """Raises GenerationError if a sequence of so many tokens cannot have had only `length`."""
    if not 0 <= length <= tokens:
        raise GenerationError(f"a sequence of {tokens} tokens cannot be rewound to {length}")


def _first_above(scores: Sequence[float], thresholds: Sequence[float]) -> int:
    """Number of the first checkpoint whose score is above its threshold (NaN is not), else how many there are."""
    for number, (score, threshold) in enumerate(zip(scores, thresholds, strict=True)):
        if score > threshold:
            return number
    return len(scores)


class State(Protocol):
    """One sequence on any engine: what `Engine.start` gives. `SequenceState` and `segmented.state.SegmentedState` are
    such."""

    lengths: list[int]

    @property
    def length(self) -> int: ...

    @property
    def computed(self) -> list[int]: ...

    @property
    def waiting(self) -> list[int]: ...

    @property
    def capacity(self) -> int: ...

    def set_thresholds(self, thresholds: Sequence[float]) -> None: ...

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult: ...

    def rewind(self, length: int) -> None: ...


class SequenceState:
    """K/V buffers, waiting hidden states and lengths of one sequence, bound once to one ONNX Runtime session.

    Attributes:
        lengths: tokens in each segment's K/V buffers, shallowest first; never increasing with depth.
    """

    def __init__(
        self, session: Any, manifest: Manifest, thresholds: Sequence[float], max_pending: int, room: int = ROOM
    ) -> None:
        """An empty sequence.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them (2.0 = off).
            max_pending: a segment is forced to run when more tokens than this would wait before it.
            room: tokens of K/V buffer to have beyond the first step's.
        """
        self._ort = import_onnxruntime()
        self._session = session
        self._binding = session.io_binding()
        self._limit = manifest.model.context_length
        self._room = room
        self._propagates = manifest.kv_cache_strategy == PROPAGATE
        waits = 0 if self._propagates else len(thresholds)
        self._pending_names = [names.pending(k + 1) for k in range(waits)]
        self._memory: dict[str, np.ndarray] = {}  # what is bound, by graph name: the binding holds bare pointers
        self.lengths = [0] * len(manifest.segment_sizes)
        self._ran = list(self.lengths)
        self._capacity = 0

        nothing = np.zeros((1, 0, manifest.model.hidden_size), np.float32)
        self._nothing = self._ort.OrtValue.ortvalue_from_numpy(nothing)
        self._pending = [self._nothing] * len(self._pending_names)  # what waits before segment 1, 2, ... K-1
        for name in self._pending_names:
            self._binding.bind_ortvalue_input(name, self._nothing)
        # Outputs of unknown size first: `get_outputs` follows the order of the first binding.
        if self._pending_names:
            self._binding.bind_output(names.NEW_PENDING)
        self._logits = np.zeros((1, manifest.model.vocab_size), np.float32)
        self._kept = 0  # rows of logits that the binding is set up for
        self._keep_logits(1)

        self._thresholds = np.array(thresholds, np.float32)
        if thresholds:
            self._exit_thresholds = self._bind_input(names.THRESHOLDS, self._thresholds.copy())
            self._skip_thresholds = self._thresholds.copy()
            for k in range(len(thresholds)):  # each a view of one of them
                self._bind_input(names.skip_threshold(k + 1), self._skip_thresholds[k : k + 1])
        self._forced_from = -1  # checkpoints from this one on have a forced skip threshold; -1: none bound yet
        self._all_forced = False
        self._bound_exits = list[float]()  # what the graph compares scores with, as float32 rounds it
        self._bound_skips = list[float]()
        self._may_wait = True  # whether a score could pass what is bound as skip thresholds
        self._left_nothing = False  # whether the output for what waits is bound to one without tokens
        self._max_pending = max_pending
        self._one_id = np.zeros((1, 1), np.int64)
        self._one_id_bound = False
        self._total = self._bind_input(names.TOTAL_LENGTH, np.zeros((), np.int32))

        self._scores = np.full((1, len(thresholds)), np.nan, np.float32)
        if thresholds:
            self._bind_output(names.SCORES, self._scores)
        self._depths = (*manifest.checkpoints, manifest.model.num_layers)
        self._kv_shapes = manifest.model.kv_shapes
        self._segment_of = [k for k, size in enumerate(manifest.segment_sizes) for _ in range(size)]

    @property
    def capacity(self) -> int:
        """Tokens the K/V buffers can hold before they grow."""
        return self._capacity

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def computed(self) -> list[int]:
        """Tokens of the sequence that each segment has run over."""
        return self._ran if self._propagates else self.lengths

    @property
    def waiting(self) -> list[int]:
        """Tokens waiting before segment 1, 2, ... K-1."""
        return [before - after for before, after in zip(self.lengths, self.lengths[1:], strict=False)]

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Uses other thresholds, one per checkpoint, from the next step on; what waits goes on waiting."""
        given = np.array(thresholds, np.float32)
        if not np.array_equal(given, self._thresholds):
            self._thresholds[:] = given
            self._forced_from = -1  # what is bound is of the old ones

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        """Runs S new tokens; the result is about the last of them.

        Args:
            ids: S >= 1 token ids, each in [0, vocab_size).
            logits_to_keep: how many of the last positions get logits where the last segment runs, at least 1; no more
                than the tokens it runs over come.
            full: run every segment and let nothing exit, whatever the thresholds. Where K/V are propagated the first
                step is such, and every step of several tokens.

        Raises:
            GenerationError: no ids, more tokens than the model's context holds, no memory for their K/V, or ONNX
                Runtime failed. The sequence is as it was before the step.
        """
        count, total = len(ids), check_step(ids, self.lengths[0], self._limit)
        if total > self._capacity:
            self._grow(total)
        if count > 1:
            self._bind_input(names.INPUT_IDS, np.array(ids, np.int64)[None])
            self._one_id_bound = False
        else:
            self._one_id[0, 0] = ids[0]
            if not self._one_id_bound:
                self._bind_input(names.INPUT_IDS, self._one_id)
                self._one_id_bound = True
        self._total[()] = total
        self._force(total, full or (self._propagates and (count > 1 or total == 1)))
        binding = self._binding
        keep = min(logits_to_keep, total - self.lengths[-1])  # all that the last segment may run over
        if keep != self._kept or keep > 1:
            self._keep_logits(keep)
        if self._pending_names and (self._may_wait or not self._left_nothing):
            binding.bind_output(names.NEW_PENDING)  # a filled slot would pin last step's shape
            self._left_nothing = False
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            raise GenerationError(f"ONNX Runtime failed at token {total}: {first_line(error)}") from error
        scores = self._scores[0].tolist()
        segments_run = 1 + _first_above(scores, self._bound_skips)
        if self._propagates:
            self.lengths = [total] * len(self.lengths)
            for k in range(segments_run):
                self._ran[k] += count
        else:
            self._take_pending(segments_run)
            for k in range(segments_run):
                self.lengths[k] = total
        rows = self._logits if keep == 1 else self._output(bool(self._pending_names)).numpy()
        exit_layer = self._depths[_first_above(scores, self._bound_exits)]
        return StepResult(rows[-1], rows, exit_layer, segments_run, self._scores[0])

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`, as if they had never been stepped.

        Raises:
            GenerationError: `length` is negative or more than the sequence has.
        """
        check_rewind(self.lengths[0], length)
        if self._propagates and length < self.lengths[0]:
            raise GenerationError("a sequence whose K/V are propagated cannot be rewound")
        for k, deep in enumerate(self.lengths[1:]):
            if self.lengths[k] > length and self._pending[k] is not self._nothing:
                left = max(length - deep, 0)
                kept = self._pending[k].numpy()[:, :left].copy()  # or it would be memory that goes with the old value
                self._set_pending(k, self._ort.OrtValue.ortvalue_from_numpy(kept) if left else self._nothing)
        # What the buffers hold beyond is written over before it is read.
        self.lengths = [min(own, length) for own in self.lengths]

    def _force(self, total: int, full: bool) -> None:
        """Writes the thresholds of this step, where they are not those of the last.

        Segments 0 .. k-1 give segment k all it has not seen yet, so what would wait is known before the step; deeper
        segments have at least as many waiting, so those forced are the deepest.
        """
        forced = len(self._thresholds)
        while forced and self._pending_names and total - self.lengths[forced] > self._max_pending:
            forced -= 1
        if len(self._thresholds) and (forced != self._forced_from or full != self._all_forced):
            self._exit_thresholds[:] = FORCED if full else self._thresholds
            self._skip_thresholds[:] = self._exit_thresholds
            self._skip_thresholds[forced:] = FORCED
            self._bound_exits, self._bound_skips = self._exit_thresholds.tolist(), self._skip_thresholds.tolist()
            self._forced_from, self._all_forced = forced, full
            self._may_wait = bool((self._skip_thresholds < 1).any())  # if not, nothing new waits after the step

    def _keep_logits(self, count: int) -> None:
        """One row goes to memory of our own; how many more there will be is known only when the last segment runs."""
        if count != self._kept:
            places = np.arange(-count, 0, dtype=np.int64)
            self._bind_input(names.LOGITS_POSITIONS, np.stack([np.zeros_like(places), places], axis=1))
        if count > 1:
            self._binding.bind_output(names.LOGITS)
        elif self._kept != 1:
            self._bind_output(names.LOGITS, self._logits)
        self._kept = count

    def _output(self, index: int) -> Any:
        """An OrtValue of unknown size: first the new pending states, where there are checkpoints, then the logits."""
        return self._ort.OrtValue(self._binding.get_outputs_as_ortvaluevector()[index])

    def _take_pending(self, segments_run: int) -> None:
        """What waits after this step is what waits before the next: the memory changes hands, nothing is copied.

        Segments that ran have nothing left waiting, and of those that did not only the first was given something new.
        """
        for k in range(segments_run - 1):
            if self._pending[k] is not self._nothing:
                self._set_pending(k, self._nothing)
        if segments_run < len(self.lengths):
            self._set_pending(segments_run - 1, self._output(0))
        else:
            self._left_nothing = True

    def _set_pending(self, k: int, value: Any) -> None:
        self._pending[k] = value
        self._binding.bind_ortvalue_input(self._pending_names[k], value)

    def _grow(self, needed: int) -> None:
        """Moves K/V to buffers of at least `needed` tokens, one after the other so that only one exists twice."""
        capacity = max(2 * self._capacity, needed + (0 if self._capacity else self._room))
        if self._limit is not None:
            capacity = min(capacity, self._limit)
        try:
            for layer, (heads, head_dim) in enumerate(self._kv_shapes):
                used = self.lengths[self._segment_of[layer]]
                for kind in ("key", "value"):
                    # Zeros, because the kernel hands them out lazily: pages are not used before they are written.
                    grown = np.zeros((1, heads, capacity, head_dim), np.float32)
                    if used:
                        grown[:, :, :used] = self._memory[names.past(layer, kind)][:, :, :used]
                    self._bind_input(names.past(layer, kind), grown)
                    self._bind_output(names.present(layer, kind), grown)
        except MemoryError:
            raise GenerationError(f"not enough memory for the K/V cache of {capacity} tokens") from None
        self._capacity = capacity

    # An OrtValue made from a C-contiguous numpy array is the array's own memory
    # (tests/runtime/branched/test_sequence.py proves it for the pinned release), so what is written to the array later
    # is what the graph reads, and the other way round.

    def _bind_input(self, name: str, array: np.ndarray) -> np.ndarray:
        self._binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        self._memory[name] = array
        return array

    def _bind_output(self, name: str, array: np.ndarray) -> np.ndarray:
        self._binding.bind_ortvalue_output(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        self._memory[name] = array
        return array
