"""The K/V buffers of one sequence, which grow by doubling."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.sequence import ROOM, check_step


class KvBuffers:
    """K/V buffers (see `Manifest.kv_shape`) of the layers with K/V of their own.

    Attributes:
        arrays: by layer and kind ("key" or "value").
        values: OrtValues of these arrays.
        capacity: tokens they can hold.
    """

    def __init__(self, ort: Any, manifest: Manifest, room: int = ROOM) -> None:
        """`room`: tokens to hold beyond those of the first `reserve`."""
        self._ort, self._manifest, self._room = ort, manifest, room
        self._segment_of = [k for k, size in enumerate(manifest.segment_sizes) for _ in range(size)]
        self.arrays: dict[tuple[int, str], np.ndarray] = {}
        self.values: dict[tuple[int, str], Any] = {}
        self.capacity = 0

    def reserve(self, new: int, lengths: Sequence[int]) -> int:
        """Makes room for `new` more tokens after those that each segment's buffers hold; returns the tokens of the
        sequence then.

        Raises:
            GenerationError: no new tokens, more than the model's context holds, or no memory for them.
        """
        limit = self._manifest.model.context_length
        total = check_step(range(new), lengths[0], limit)
        if total > self.capacity:
            capacity = max(2 * self.capacity, total + (0 if self.capacity else self._room))
            self.allocate(capacity if limit is None else min(capacity, limit), lengths)
        return total

    def allocate(self, capacity: int, lengths: Sequence[int]) -> None:
        """Moves K/V to buffers of `capacity` tokens.

        Raises:
            GenerationError: no memory.
        """
        manifest = self._manifest
        try:
            # The kernel provides zeroed pages when they are written: a large buffer uses no memory yet.
            arrays = {
                (layer, kind): np.zeros((1, heads, capacity, width), manifest.kv_dtype)
                for layer in manifest.model.kv_read(range(manifest.model.num_layers))
                for heads, width in [manifest.kv_shape(layer)]
                for kind in ("key", "value")
            }
        except MemoryError:
            raise GenerationError(f"not enough memory for the K/V cache of {capacity} tokens") from None
        for (layer, kind), grown in arrays.items():
            used = lengths[self._segment_of[layer]]
            if used:
                grown[:, :, :used] = self.arrays[layer, kind][:, :, :used]
            self.arrays[layer, kind] = grown
            self.values[layer, kind] = self._ort.OrtValue.ortvalue_from_numpy(grown)
        self.capacity = capacity
