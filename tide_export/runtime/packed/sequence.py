"""One sequence of a packed batch: its K/V buffers, its pending hidden states, and how far each segment has come.

Nothing is bound here: `SegmentRun` binds the buffers to the slot that the sequence is in.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.onnxruntime.kv_buffers import KvBuffers
from tide_export.runtime.sequence import ROOM, SequenceState, SingleSequence, StepResult


class LoneSequence(SingleSequence):
    """A sequence that can go on where another one on the same K/V buffers has come."""

    @property
    @abstractmethod
    def pending_states(self) -> list[np.ndarray]:
        """Copies of the hidden states float32 [n, D] that are pending before each segment; none before the first."""

    @abstractmethod
    def resume(self, lengths: Sequence[int], computed: Sequence[int], pending_states: Sequence[np.ndarray]) -> None:
        """Goes on after these tokens.

        Args:
            lengths, computed: as the attributes.
            pending_states: as the attribute; they are not changed.
        """


class PackedSequence(SequenceState):
    """Attributes:
    skipped: tokens of each segment's K/V buffers whose keys and values come from the state they exited with.
    pending_states: float32 [n, D] before each segment; none before the first.
    kv: its K/V buffers.
    """

    def __init__(self, ort: Any, manifest: Manifest) -> None:
        super().__init__(len(manifest.segment_sizes))
        self._propagates = manifest.kv_cache_strategy == PROPAGATE
        self._kv_dtype = np.dtype(manifest.kv_dtype)
        self._token_size = manifest.kv_token_bytes // self._kv_dtype.itemsize
        self.kv = KvBuffers(ort, manifest, ROOM)
        self.skipped = [0] * len(self.lengths)
        self.pending_states = [np.zeros((0, manifest.model.hidden_size), np.float32)] * len(self.lengths)
        self._stepped_alone = list[np.ndarray]()  # the pending states after the last step of `step_alone`

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

    def step_alone(self, lone: LoneSequence, ids: Sequence[int] | np.ndarray, keep: int, full: bool) -> StepResult:
        """Steps this sequence on `lone`, which has its K/V buffers; see `SingleSequence.step`."""
        stepped = self._stepped_alone
        if lone.lengths != self.lengths or any(a is not b for a, b in zip(self.pending_states, stepped, strict=False)):
            lone.resume(self.lengths, self.computed, self.pending_states)
        result = lone.step(ids, keep, full)
        self.lengths, self._stepped_alone = list(lone.lengths), lone.pending_states
        self.skipped = [held - ran for held, ran in zip(lone.lengths, lone.computed, strict=True)]
        self.pending_states = list(self._stepped_alone)
        return result

    def write(self, layer: int, kind: str, position: int, values: np.ndarray) -> None:
        """Writes the key or value, [kv_heads, head_dim], of the token at `position`."""
        self.kv.arrays[layer, kind][0, :, position] = values

    def read_kv(self, start: int, stop: int) -> np.ndarray:
        """Copies the K/V of the tokens from `start` to `stop`, which every segment holds: flat, of the
        buffers' type.

        Raises:
            GenerationError: no memory.
        """
        try:
            copied = np.empty((stop - start) * self._token_size, self._kv_dtype)
        except MemoryError:
            raise GenerationError(f"not enough memory to copy the K/V of {stop - start} tokens") from None
        for values, buffer in self._parts(copied):
            values[:] = buffer[0, :, start:stop]
        return copied

    def write_kv(self, blocks: Sequence[np.ndarray], length: int) -> None:
        """Begins this empty sequence with `length` tokens whose K/V are in `blocks`, copied by `read_kv`, in order; the
        last block may hold more.

        Raises:
            GenerationError: as `KvBuffers.reserve`.
        """
        stops = np.cumsum([len(block) // self._token_size for block in blocks]).tolist()
        self.kv.reserve(stops[-1], self.lengths)
        for block, start, stop in zip(blocks, [0, *stops], stops, strict=False):
            for values, buffer in self._parts(block):
                buffer[0, :, start:stop] = values
        self.lengths = [length] * len(self.lengths)

    def _parts(self, block: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of a block of K/V, views [heads, tokens, head_dim], each with the buffer that it belongs to."""
        tokens, stop = len(block) // self._token_size, 0
        for buffer in self.kv.arrays.values():
            heads, head_dim = buffer.shape[1], buffer.shape[3]
            start, stop = stop, stop + heads * tokens * head_dim
            yield block[start:stop].reshape(heads, tokens, head_dim), buffer
