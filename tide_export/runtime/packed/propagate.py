"""The step over several sequences where K/V are propagated (rule: `compose.propagate`; check: `verify.oracle`).

A sequence that exits has a frozen hidden state: the later segments run without it, and it gets the keys and values that
their layers compute from that state, in one small network for all sequences that skip a segment. Nothing is ever
pending. A token that skips a layer needs no attention there, so its key and value are written to the K/V buffers from
here.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.errors import GenerationError, first_line
from tide_export.runtime.packed.batch import PackedBatch, StartAlone
from tide_export.runtime.packed.networks import BatchSessions, kv_written
from tide_export.runtime.sequence import StepResult


class PropagatingBatch(PackedBatch):
    """As `PackedBatch`; every segment's K/V buffers hold all tokens of a sequence."""

    def __init__(self, sessions: BatchSessions, manifest: Manifest, start_alone: StartAlone | None = None) -> None:
        """An empty batch; see `PackedBatch`."""
        super().__init__(sessions, manifest, 1.0, start_alone)
        self._skipped = sessions.skipped

    def _step_all(
        self, new: Mapping[int, Sequence[int] | np.ndarray], keep: Mapping[int, int], full: Collection[int]
    ) -> dict[int, StepResult]:
        """As `PackedBatch`, without `keep` and `full`, which are for lossless mode. A sequence's first step runs every
        segment over it, as does each of several tokens."""
        assert not keep
        assert not full
        steps = self._begin(new)
        running, counts = list(steps), [len(one.states) for one in steps.values()]
        entry = self._entry(0, list(steps.values()), counts, whole=True)
        reading = {slot for slot, one in steps.items() if len(one.states) > 1 or one.total == 1}
        frozen: dict[int, np.ndarray] = {}  # the hidden state [D] of each that exited
        for k, segment in enumerate(self._segments):
            if frozen and k in self._skipped:
                self._skip(k, frozen, [steps[slot].total - 1 for slot in frozen])
            if not running:
                continue
            deepest = k + 1 == len(self._segments)
            thresholds = [] if deepest else self._thresholds(k, running, reading)
            totals = [steps[slot].total for slot in running]
            segment.run(running, counts, totals, [1] * len(running), entry, thresholds)
            exits = np.array([True] * len(running) if deepest else segment.exits(thresholds))
            for index, slot in enumerate(running):
                steps[slot].segments_run += 1
                if exits[index]:
                    steps[slot].exit_segment = k
                    steps[slot].exit_states = segment.states[index : index + 1].copy()
            if deepest:
                break
            entry = segment.hidden
            if exits.any():
                tokens = np.repeat(exits, counts)  # each that exits has one
                gone = [slot for slot, exit_ in zip(running, exits, strict=True) if exit_]
                frozen |= dict(zip(gone, segment.hidden[0, tokens], strict=True))
                entry = segment.hidden[:, ~tokens]
                counts = [count for count, exit_ in zip(counts, exits, strict=True) if not exit_]
                running = [slot for slot in running if slot not in frozen]
        results = self._results(steps)
        for one in steps.values():
            one.sequence.lengths = [one.total] * len(one.sequence.lengths)
            one.sequence.skipped = [n + (k > one.exit_segment) for k, n in enumerate(one.sequence.skipped)]
        return results

    def _skip(self, k: int, frozen: Mapping[int, np.ndarray], positions: Sequence[int]) -> None:
        """Writes the keys and values that segment k's layers compute from frozen hidden states, by slot."""
        feeds = {names.HIDDEN_STATES: np.stack(list(frozen.values()))[None], names.POSITION_IDS: np.array([positions])}
        for (layer, kind), values in self._keys_values(k, feeds).items():
            for index, (slot, position) in enumerate(zip(frozen, positions, strict=True)):
                self.sequences[slot].write(layer, kind, position, values[0, :, index])

    def _keys_values(self, k: int, feeds: dict[str, np.ndarray]) -> dict[tuple[int, str], np.ndarray]:
        """float32 [1, kv_heads, m, head_dim] by layer and kind."""
        outputs = [(layer, kind) for layer in kv_written(self._manifest, k) for kind in ("key", "value")]
        session: Any = self._skipped[k]
        try:
            return dict(zip(outputs, session.run([names.new(*one) for one in outputs], feeds), strict=True))
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise GenerationError(f"ONNX Runtime failed in {names.skipped(k)}: {first_line(error)}") from error
