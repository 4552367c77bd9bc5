"""One sequence of a packed batch: its K/V buffers, its pending hidden states, and how far each segment has come.

Nothing is bound here: `SegmentRun` binds the buffers to the slot that the sequence is in.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.sequence import ROOM, SequenceState, check_step, zeroed_kv


class PackedSequence(SequenceState):
    """Attributes:
    skipped: tokens of each segment's K/V buffers whose keys and values come from the state they exited with.
    pending_states: float32 [n, D] before each segment; none before the first.
    values: OrtValues of the K/V buffers, by layer and kind.
    capacity: tokens these can hold.
    """

    def __init__(self, ort: Any, manifest: Manifest) -> None:
        super().__init__(len(manifest.segment_sizes))
        self._ort = ort
        self._model = manifest.model
        self._propagates = manifest.kv_cache_strategy == PROPAGATE
        self._limit = manifest.model.context_length
        self._token_size = manifest.model.kv_token_size
        self._segment_of = [k for k, size in enumerate(manifest.segment_sizes) for _ in range(size)]
        self._buffers: dict[tuple[int, str], np.ndarray] = {}
        self.values: dict[tuple[int, str], Any] = {}
        self.skipped = [0] * len(self.lengths)
        self.pending_states = [np.zeros((0, manifest.model.hidden_size), np.float32)] * len(self.lengths)
        self.capacity = 0

    @property
    def computed(self) -> list[int]:
        """Tokens that each segment has run over."""
        return [held - skipped for held, skipped in zip(self.lengths, self.skipped, strict=True)]

    def rewind(self, length: int) -> None:
        if self._propagates and 0 <= length < self.lengths[0]:
            raise GenerationError("a sequence whose K/V are propagated cannot be rewound")
        before = self.lengths
        super().rewind(length)
        for k in range(1, len(before)):
            left = max(length - before[k], 0)
            if left < len(self.pending_states[k]):
                self.pending_states[k] = self.pending_states[k][:left].copy()

    def write(self, layer: int, kind: str, position: int, values: np.ndarray) -> None:
        """Writes the key or value, [kv_heads, head_dim], of the token at `position`."""
        self._buffers[layer, kind][0, :, position] = values

    def read_kv(self, start: int, stop: int) -> np.ndarray:
        """Copies the K/V of the tokens from `start` to `stop`, which every segment holds: float32, flat.

        Raises:
            GenerationError: no memory.
        """
        try:
            copied = np.empty((stop - start) * self._token_size, np.float32)
        except MemoryError:
            raise GenerationError(f"not enough memory to copy the K/V of {stop - start} tokens") from None
        for values, buffer in self._parts(copied):
            values[:] = buffer[0, :, start:stop]
        return copied

    def write_kv(self, blocks: Sequence[np.ndarray], length: int) -> bool:
        """Begins this empty sequence with `length` tokens whose K/V are in `blocks`, copied by `read_kv`, in order; the
        last block may hold more. Returns whether the buffers changed.

        Raises:
            GenerationError: as `reserve`.
        """
        stops = np.cumsum([len(block) // self._token_size for block in blocks]).tolist()
        changed = self.reserve(stops[-1])
        for block, start, stop in zip(blocks, [0, *stops], stops, strict=False):
            for values, buffer in self._parts(block):
                buffer[0, :, start:stop] = values
        self.lengths = [length] * len(self.lengths)
        return changed

    def reserve(self, new: int) -> bool:
        """Makes room for `new` more tokens; returns whether the buffers changed.

        Raises:
            GenerationError: no new tokens, more than the model's context holds, or no memory for them.
        """
        total = check_step(range(new), self.lengths[0], self._limit)
        if total <= self.capacity:
            return False
        capacity = max(2 * self.capacity, total + (0 if self.capacity else ROOM))
        self.allocate(capacity if self._limit is None else min(capacity, self._limit))
        return True

    def allocate(self, capacity: int) -> None:
        """Moves K/V to buffers of `capacity` tokens."""
        for (layer, kind), grown in zeroed_kv(self._model, capacity).items():
            used = self.lengths[self._segment_of[layer]]
            if used:
                grown[:, :, :used] = self._buffers[layer, kind][:, :, :used]
            self._buffers[layer, kind] = grown
            self.values[layer, kind] = self._ort.OrtValue.ortvalue_from_numpy(grown)
        self.capacity = capacity

    def _parts(self, block: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of a block of K/V, views [heads, tokens, head_dim], each with the buffer that it belongs to."""
        tokens, stop = len(block) // self._token_size, 0
        for buffer in self._buffers.values():
            heads, head_dim = buffer.shape[1], buffer.shape[3]
            start, stop = stop, stop + heads * tokens * head_dim
            yield block[start:stop].reshape(heads, tokens, head_dim), buffer
