"""The step over several sequences where K/V are propagated (`compose.propagate` has the rule, `oracle` judges it).

A sequence that leaves stands still: the segments behind go on without it, and it gets the keys and values that their
layers make of the state it left with, which a small network computes for all who skip a segment at once. Nothing waits
and nobody catches up, so there is no choice to make as in `runtime.packed.batch`.

Its attention being nobody's concern, a token that skips a layer needs no operator on its K/V buffers: its key and value
are put there from here.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.decoding.depth_rule import RowResult
from tide_export.runtime.onnxruntime.session import first_line
from tide_export.runtime.packed.batch import Batch
from tide_export.runtime.packed.networks import BatchSessions, layers_of


class PropagatingBatch(Batch):
    """As `Batch`; every sequence has as many tokens in each segment's K/V buffers as it has tokens."""

    def __init__(self, sessions: BatchSessions, manifest: Manifest, thresholds: Sequence[float]) -> None:
        """An empty batch.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them (2.0 = off).
        """
        super().__init__(sessions, manifest, thresholds, max_pending=0, compaction_threshold=1.0)
        self._skipped = sessions.skipped

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, RowResult]:
        """As `Batch.step`, but the result is always about a sequence's own exit, and none may ask for more: there is no
        lossless mode. A sequence's first step runs every segment over it, as does each of several tokens."""
        assert not logits_to_keep
        assert not full
        running, totals, entry = self._take(new)
        everyone, counts = running, [len(new[place]) for place in running]
        left: dict[int, tuple[int, np.ndarray]] = {}  # the checkpoint each left at, and what the head sees of it
        still: dict[int, np.ndarray] = {}  # the state [D] that each who left stands still at
        for k, segment in enumerate(self._segments):
            if still:
                self._skip(k, still, totals)
            if not running:
                continue
            segment.run(running, counts, [totals[place] for place in running], [1] * len(running), entry)
            last = k + 1 == len(self._segments)
            decoding = np.array([count == 1 < totals[place] for place, count in zip(running, counts, strict=True)])
            leaves = np.ones(len(running), bool) if last else (segment.scores > self._thresholds[k]) & decoding
            for index in np.flatnonzero(leaves):
                left[running[index]] = (k, segment.states[0, index].copy())
            if last:
                break
            rows = np.repeat(leaves, counts)  # one token each of those who leave: no others may
            still |= dict(zip((place for place in running if place in left), segment.hidden[0, rows], strict=True))
            if leaves.any():
                entry = segment.hidden[:, ~rows]
                running = [place for place in running if place not in left]
                counts = [len(new[place]) for place in running]
            else:
                entry = segment.hidden
        logits = self._logits(np.stack([left[place][1] for place in everyone])[None])
        for place in everyone:
            row, deepest = self.rows[place], left[place][0]
            row.lengths = [totals[place]] * len(row.lengths)
            row.skipped = [count + (k > deepest) for k, count in enumerate(row.skipped)]
        return {
            place: RowResult(logits[index], logits[index][None], self._depths[left[place][0]], left[place][0] + 1)
            for index, place in enumerate(everyone)
        }

    def _skip(self, k: int, still: Mapping[int, np.ndarray], totals: Mapping[int, int]) -> None:
        """Writes the keys and values that segment k's layers make of the states of those who left before it."""
        places = [totals[place] - 1 for place in still]
        feeds = {names.HIDDEN_STATES: np.stack(list(still.values()))[None], names.POSITION_IDS: np.array([places])}
        for (layer, kind), made in self._keys_values(k, feeds).items():
            for index, (place, at) in enumerate(zip(still, places, strict=True)):
                self.rows[place].write(layer, kind, at, made[0, :, index])

    def _keys_values(self, k: int, feeds: dict[str, np.ndarray]) -> dict[tuple[int, str], np.ndarray]:
        """float32 [1, kv_heads, m, head_dim] by layer and kind."""
        made = [(layer, kind) for layer in layers_of(self._manifest, k) for kind in ("key", "value")]
        session: Any = self._skipped[k - 1]
        try:
            return dict(zip(made, session.run([names.new(*one) for one in made], feeds), strict=True))
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            raise GenerationError(f"ONNX Runtime failed in {names.skipped(k)}: {first_line(error)}") from error
