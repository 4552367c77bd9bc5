"""One sequence over networks of one segment each: a step of one slot."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export.errors import GenerationError
from tide_export.runtime.segmented.steps import SegmentedSteps
from tide_export.runtime.sequence import ExitRule, SingleSequence, StepResult


class SegmentedSequence(SingleSequence):
    """The sequence in the only slot of `steps`."""

    def __init__(self, steps: SegmentedSteps, segments: int, thresholds: Sequence[float], max_pending: int) -> None:
        """An empty sequence; see `Backend.start`."""
        super().__init__(segments)
        self._steps, self._buffers = steps, steps.buffers
        self._rule = ExitRule.of(thresholds, max_pending)

    @property
    def capacity(self) -> int:
        """Tokens the sequence can have."""
        return self._steps.capacity

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        self._rule = ExitRule.of(thresholds, self._rule.max_pending)

    def save(self) -> Any:
        return self.length

    def restore(self, saved: Any) -> None:
        if self._buffers.busy:
            raise GenerationError("the generation was interrupted in the middle of a step: start it again")
        self.rewind(saved)

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        slots = (0,) if full else ()
        return self._steps.step({0: self}, {0: self._rule}, {0: ids}, {0: logits_to_keep}, slots, alone=True)[0]
