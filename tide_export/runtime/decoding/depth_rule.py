"""Which sequences of a step run through a segment: one rule for every engine.

Each sequence follows the rule of `runtime.segmented.sequence` by itself, so its tokens are those it would have alone.
What a batch adds is a choice that changes speed alone. A segment reads its weights once however many sequences it runs,
so when one needs it, sequences that could wait may catch up along with it nearly for free, while weights are what a run
waits for; where arithmetic is, only those that need it should go. `compaction_threshold` draws the line.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class RowResult(NamedTuple):
    """What a step says about one sequence's last token."""

    logits: np.ndarray  # float32 [V]
    rows: np.ndarray  # float32 [m, V], of the last m positions; one unless more were asked for and the last segment ran
    exit_layer: int  # layers the logits' hidden state went through
    segments_run: int  # segments 0 .. this-1 ran over this sequence, also those it only caught up in


class BatchRow(Protocol):
    """One sequence of a batch on any engine."""

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        ...

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens in each segment's K/V buffers, shallowest first; never increasing with depth."""
        ...

    @property
    def computed(self) -> Sequence[int]:
        """Tokens that each segment has run over."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`; of batches that verify drafts."""
        ...


class AnyBatch(Protocol):
    """A batch on any engine, that `generate_batch` drives: `step.Batch` and `segmented.batch.SegmentedBatch`."""

    @property
    def rows(self) -> Mapping[int, BatchRow]: ...

    @property
    def free(self) -> int: ...

    def join(self) -> int: ...

    def leave(self, place: int) -> None: ...

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, RowResult]: ...


def still_needing(needed: Sequence[int], left: Container[int], waits: Mapping[int, int], max_pending: int) -> list[int]:
    """Of those that needed the segment before, who needs the next.

    Args:
        left: places whose token could leave already.
        waits: tokens of each that would wait before the next segment.
        max_pending: so many of them may wait.
    """
    return [place for place in needed if place not in left or waits[place] > max_pending]


def runners(needed: list[int], everyone: list[int], came: list[int] | None, compaction_threshold: float) -> list[int]:
    """Who runs a segment that `needed` need: they alone, or all in the step.

    Args:
        came: who ran the segment before; None: there is none.
        compaction_threshold: when a smaller share of the step than this needs it, only those run.
    """
    together = len(needed) >= compaction_threshold * len(everyone) and came in (None, everyone)
    return everyone if together else needed
