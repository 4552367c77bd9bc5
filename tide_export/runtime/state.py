"""One sequence in flight: its K/V buffers, the hidden states waiting between segments, and the step that moves it on.

`Engine` makes one `SequenceState` per generation and calls `step` with the prompt, then with one token at a time. What
exits and which segments run is decided in the graph; this module only lends it memory. K/V buffers are bound as input
and output at once, so that the graph writes new keys in place and a skipped segment costs nothing; they grow by
doubling. A state serves one thread at a time; any number of states share one session.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tide_export import names
from tide_export.bundle import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.session import first_line, import_onnxruntime

ROOM = 128  # tokens of K/V buffer beyond the prompt before the first growth
NO_LIMIT = 2**62  # more tokens than can ever wait
FORCED = 2.0  # a skip threshold that no score is above


class StepResult(NamedTuple):
    """What one step says about its last token. The arrays are the state's own and change with the next step."""

    logits: np.ndarray  # float32 [V]
    exit_layer: int  # layers the logits' hidden state went through; the model's depth when it did not exit
    segments_run: int  # segments 0 .. this-1 ran in this step
    scores: np.ndarray  # float32 [K-1], NaN where the router was not reached


class SequenceState:
    """K/V buffers, waiting hidden states and lengths of one sequence, bound once to one ONNX Runtime session.

    Attributes:
        lengths: tokens in each segment's K/V buffers, shallowest first; never increasing with depth.
        capacity: tokens the K/V buffers can hold before they grow.
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
        self._pending_names = [(names.pending(k + 1), names.pending_out(k + 1)) for k in range(len(thresholds))]
        self._memory: dict[str, np.ndarray] = {}  # what is bound, by graph name: the binding holds bare pointers
        self.lengths = [0] * len(manifest.segment_sizes)
        self.capacity = 0

        self._waits = [False] * len(self._pending_names)  # whether tokens wait before segment 1, 2, ... K-1
        self._nothing = self._ort.OrtValue.ortvalue_from_numpy(np.zeros((1, 0, manifest.model.hidden_size), np.float32))
        # Outputs of unknown size first: `get_outputs` follows the order of the first binding.
        for name, name_out in self._pending_names:
            self._binding.bind_output(name_out)
            self._binding.bind_ortvalue_input(name, self._nothing)
        if thresholds:
            self._bind_input(names.THRESHOLDS, np.array(thresholds, np.float32))
            self._bind_input(names.SKIP_THRESHOLDS, np.array(thresholds, np.float32))
        self._max_pending = max_pending
        self._one_id = np.zeros((1, 1), np.int64)
        self._one_id_bound = False
        self._total = self._bind_input(names.TOTAL_LENGTH, np.zeros((), np.int32))

        self._scores = np.full((1, len(thresholds)), np.nan, np.float32)
        if thresholds:
            self._bind_output(names.SCORES, self._scores)
        self._exit_layer = self._bind_output(names.EXIT_LAYERS, np.zeros(1, np.int64))
        self._segments_run = self._bind_output(names.SEGMENTS_RUN, np.zeros(1, np.int64))
        self._logits = self._bind_output(names.LOGITS, np.zeros((1, 1, manifest.model.vocab_size), np.float32))[0, 0]
        self._kv_shapes = manifest.model.kv_shapes
        self._segment_of = [k for k, size in enumerate(manifest.segment_sizes) for _ in range(size)]

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def waiting(self) -> list[int]:
        """Tokens waiting before segment 1, 2, ... K-1."""
        return [before - after for before, after in zip(self.lengths, self.lengths[1:], strict=False)]

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Uses other thresholds, one per checkpoint, from the next step on; what waits goes on waiting."""
        if self._pending_names:
            self._memory[names.THRESHOLDS][:] = thresholds

    def step(self, ids: Sequence[int] | np.ndarray) -> StepResult:
        """Runs S new tokens; the result is about the last of them.

        Args:
            ids: S >= 1 token ids, each in [0, vocab_size).

        Raises:
            GenerationError: no ids, more tokens than the model's context holds, no memory for their K/V, or ONNX
                Runtime failed. The sequence is as it was before the step.
        """
        count = len(ids)
        total = self.lengths[0] + count
        if count == 0:
            raise GenerationError("a step needs at least one token")
        if self._limit is not None and total > self._limit:
            raise GenerationError(f"the sequence would have {total} tokens but the model's context holds {self._limit}")
        if total > self.capacity:
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
        if self._pending_names:
            # Segments 0 .. k-1 give segment k all it has not seen yet, so what would wait is known before the step.
            skip = self._memory[names.SKIP_THRESHOLDS]
            skip[:] = self._memory[names.THRESHOLDS]
            for k, length in enumerate(self.lengths[1:]):
                if total - length > self._max_pending:
                    skip[k] = FORCED

        binding = self._binding
        for _, name_out in self._pending_names:
            binding.bind_output(name_out)  # again each time: a filled slot would pin last step's shape
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            raise GenerationError(f"ONNX Runtime failed at token {total}: {first_line(error)}") from error
        segments_run = int(self._segments_run[0])
        self._take_pending(segments_run)
        for k in range(segments_run):
            self.lengths[k] = total
        return StepResult(self._logits, int(self._exit_layer[0]), segments_run, self._scores[0])

    def _take_pending(self, segments_run: int) -> None:
        """What waits after this step is what waits before the next: the memory changes hands, nothing is copied.

        Segments that ran have nothing left waiting, and of those that did not only the first was given something new.
        """
        for k in range(1, segments_run):
            if self._waits[k - 1]:
                self._binding.bind_ortvalue_input(self._pending_names[k - 1][0], self._nothing)
                self._waits[k - 1] = False
        if segments_run < len(self.lengths):
            k = segments_run
            taken = self._binding.get_outputs_as_ortvaluevector()[k - 1]
            self._binding.bind_ortvalue_input(self._pending_names[k - 1][0], self._ort.OrtValue(taken))
            self._waits[k - 1] = True

    def _grow(self, needed: int) -> None:
        """Moves K/V to buffers of at least `needed` tokens, one after the other so that only one exists twice."""
        capacity = max(2 * self.capacity, needed + (0 if self.capacity else self._room))
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
        self.capacity = capacity

    # An OrtValue made from a C-contiguous numpy array is the array's own memory (tests/runtime/test_state.py proves it
    # for the pinned release), so what is written to the array later is what the graph reads, and the other way round.

    def _bind_input(self, name: str, array: np.ndarray) -> np.ndarray:
        self._binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        self._memory[name] = array
        return array

    def _bind_output(self, name: str, array: np.ndarray) -> np.ndarray:
        self._binding.bind_ortvalue_output(name, self._ort.OrtValue.ortvalue_from_numpy(array))
        self._memory[name] = array
        return array
