"""One sequence of a batch: its K/V buffers, the hidden states waiting before each segment, and how far each has come.

As `runtime.branched.sequence.SequenceState`, but nothing is bound here: a row may take any place of a batch and leave
it again.
"""

from typing import Any

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.branched.sequence import ROOM, check_rewind, check_step


class Row:
    """Attributes:
    lengths: tokens in each segment's K/V buffers, shallowest first; never increasing with depth.
    skipped: how many of them skipped the segment and got keys and values of the state they left with.
    waiting: hidden states float32 [n, D] before each segment; nothing ever waits before the first.
    values: OrtValues of the buffers, by layer and kind.
    """

    def __init__(self, ort: Any, manifest: Manifest) -> None:
        self._ort = ort
        self._kv_shapes = manifest.model.kv_shapes
        self._limit = manifest.model.context_length
        self._segment_of = [k for k, size in enumerate(manifest.segment_sizes) for _ in range(size)]
        self._buffers: dict[tuple[int, str], np.ndarray] = {}
        self.values: dict[tuple[int, str], Any] = {}
        self.lengths = [0] * len(manifest.segment_sizes)
        self.skipped = [0] * len(self.lengths)
        self.waiting = [np.zeros((0, manifest.model.hidden_size), np.float32)] * len(self.lengths)
        self.capacity = 0

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def computed(self) -> list[int]:
        """Tokens that each segment has run over."""
        return [held - skipped for held, skipped in zip(self.lengths, self.skipped, strict=True)]

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`, as if they had never been stepped. Not where K/V are propagated.

        Raises:
            GenerationError: `length` is negative or more than the sequence has.
        """
        check_rewind(self.length, length)
        for k in range(1, len(self.lengths)):
            left = max(length - self.lengths[k], 0)
            if left < len(self.waiting[k]):
                self.waiting[k] = self.waiting[k][:left].copy()
        # What the buffers hold beyond is written over before it is read.
        self.lengths = [min(own, length) for own in self.lengths]

    def write(self, layer: int, kind: str, place: int, values: np.ndarray) -> None:
        """Puts one token's key or value, [kv_heads, head_dim], where that of token number `place` belongs."""
        self._buffers[layer, kind][0, :, place] = values

    def reserve(self, new: int) -> bool:
        """Makes room for `new` more tokens; says whether the buffers are others now.

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
        try:
            for layer, (heads, head_dim) in enumerate(self._kv_shapes):
                used = self.lengths[self._segment_of[layer]]
                for kind in ("key", "value"):
                    # Zeros, because the kernel hands them out lazily: pages are not used before they are written.
                    grown = np.zeros((1, heads, capacity, head_dim), np.float32)
                    if used:
                        grown[:, :, :used] = self._buffers[layer, kind][:, :, :used]
                    self._buffers[layer, kind] = grown
                    self.values[layer, kind] = self._ort.OrtValue.ortvalue_from_numpy(grown)
        except MemoryError:
            raise GenerationError(f"not enough memory for the K/V cache of {capacity} tokens") from None
        self.capacity = capacity
