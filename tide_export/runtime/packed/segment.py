"""One segment's session with the bindings of one batch: runs any of the slots, each over its new tokens.

K/V buffers are bound as input and output at once, slot by slot: keys and values are written in place, and a slot that
is not run costs an untaken branch. An empty slot is bound to buffers of one token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export import names
from tide_export.errors import GenerationError, first_line
from tide_export.runtime.onnxruntime.bindings import Binding
from tide_export.runtime.packed.sequence import PackedSequence


class SegmentRun:
    """Attributes:
    states: float32 [m, D'], exit states of the requested positions of the last run: the head's input.
    scores: float32 [m], the router's of them; not of the last segment. Where the threshold is above 1 a state is not
        computed, and a score NaN.
    hidden: float32 [1, N, D], the new hidden states; not of the last segment.

    The arrays change with the next run.
    """

    states: np.ndarray
    scores: np.ndarray
    hidden: np.ndarray

    def __init__(
        self,
        ort: Any,
        session: Any,
        k: int,
        layers: range,
        read: Sequence[int],
        slots: int,
        padding: PackedSequence,
        widths: tuple[int, int],
        last: bool,
    ) -> None:
        """`layers` are the segment's, `read` those whose K/V it reads; `padding` is bound to empty slots; `widths` are
        those of states and exit states."""
        self._session, self._k, self._layers, self._read, self._last = session, k, layers, read, last
        self._hidden_size, self._exit_size = widths
        self._binding = Binding(ort, session)
        self._slot_tokens = self._binding.input(names.SLOT_TOKENS, np.zeros(slots, np.int64))
        self._slot_lengths = self._binding.input(names.SLOT_LENGTHS, np.ones(slots, np.int32))
        self._shape = (-1, -1)
        for slot in range(slots):
            self.bind(slot, padding)

    def bind(self, slot: int, sequence: PackedSequence) -> None:
        """Binds the buffers of the sequence in a slot."""
        binding = self._binding.io
        for layer in self._read:
            for kind in ("key", "value"):
                value = sequence.kv.values[layer, kind]
                binding.bind_ortvalue_input(names.slot(names.past(layer, kind), slot), value)
                if layer in self._layers:
                    binding.bind_ortvalue_output(names.slot(names.present(layer, kind), slot), value)

    def run(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        totals: Sequence[int],
        positions: Sequence[int],
        entry: np.ndarray,
        thresholds: Sequence[float] = (),
    ) -> None:
        """Runs the sequences in `slots`, ascending.

        Args:
            counts: tokens of each.
            totals: tokens each will then have in the K/V cache.
            positions: of each, for how many of the last positions exit states are requested.
            entry: of all of them, concatenated: token ids int64 [1, N] or hidden states float32 [1, N, D].
            thresholds: for the score of each, whose last position alone is requested then; none for the last segment.

        Raises:
            GenerationError: ONNX Runtime failed.
        """
        shape = (entry.shape[1], sum(positions))
        if shape != self._shape:
            self._allocate(*shape)
        self._bind_entry(names.INPUT_IDS if self._k == 0 else names.HIDDEN_STATES, entry)
        ends, arrays = np.cumsum(counts), self._binding.arrays
        arrays[names.LAST_TOKENS][:] = _last_indices(ends, positions)
        # Each token's position in its sequence: it counts up to the sequence's last one.
        arrays[names.POSITION_IDS][0] = np.arange(shape[0]) + np.repeat(np.asarray(totals) - ends, counts)
        if not self._last:
            arrays[names.SLOT_THRESHOLDS][:, 0] = thresholds
        self._slot_tokens[:] = 0
        self._slot_lengths[:] = 1
        self._slot_tokens[slots] = counts
        self._slot_lengths[slots] = totals
        try:
            self._session.run_with_iobinding(self._binding.io)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise GenerationError(f"ONNX Runtime failed in {names.segment(self._k)}: {first_line(error)}") from error

    def exits(self, thresholds: Sequence[float]) -> list[bool]:
        """Whether each score of the last run is above its threshold."""
        return [score > threshold for score, threshold in zip(self.scores.tolist(), thresholds, strict=True)]

    def _bind_entry(self, name: str, array: np.ndarray) -> None:
        if self._binding.arrays.get(name) is not array:
            self._binding.input(name, array)

    def _allocate(self, tokens: int, positions: int) -> None:
        binding = self._binding
        binding.input(names.LAST_TOKENS, np.zeros(positions, np.int64))
        binding.input(names.POSITION_IDS, np.zeros((1, tokens), np.int64))
        self.states = binding.output(names.EXIT_STATES, np.zeros((positions, self._exit_size), np.float32))
        if not self._last:
            hidden = np.zeros((1, tokens, self._hidden_size), np.float32)
            self.hidden = binding.output(names.NEW_HIDDEN_STATES, hidden)
            binding.input(names.SLOT_THRESHOLDS, np.zeros((positions, 1), np.float32))
            scores = binding.output(names.ROUTER_SCORE, np.zeros((positions, 1), np.float32))
            self.scores = scores.reshape(positions)
        self._shape = (tokens, positions)


def _last_indices(ends: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The `sizes` [n] indices right before each of `ends` [n], concatenated: int64 [sum of sizes]."""
    stops = np.cumsum(sizes)
    return np.arange(stops[-1]) + np.repeat(ends - stops, sizes)
