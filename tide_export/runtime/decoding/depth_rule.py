"""Which sequences of a step run through a segment: one rule for every engine.

Each sequence follows the exit rule separately, so its tokens are those it would have alone. A batch adds one choice,
which changes speed alone: a segment reads its weights once however many sequences it runs, so when one sequence needs
it, others with tokens pending before it may catch up in the same run nearly for free where a run is bound by memory.
Where it is bound by arithmetic, only those that need it should run. `compaction_threshold` decides.
"""

from collections.abc import Container, Mapping, Sequence


def active_slots(
    ran: Sequence[int], exited: Container[int], pending: Mapping[int, int], max_pending: Mapping[int, int]
) -> list[int]:
    """The slots that need the next segment, of those that ran the segment before; also of those that only caught up.

    Args:
        exited: slots whose token could exit already.
        pending: tokens of each that would be pending before the next segment.
        max_pending: the largest allowed number of them, by slot.
    """
    return [slot for slot in ran if slot not in exited or pending[slot] > max_pending[slot]]


def scheduled_slots(
    active: list[int], everyone: list[int], previous: list[int] | None, compaction_threshold: float
) -> list[int]:
    """The slots that run a segment which `active` need: these alone, or all in the step.

    Args:
        previous: those that ran the segment before; None: there is none.
        compaction_threshold: when a smaller share of the step than this needs it, only those run.
    """
    catch_up = len(active) >= compaction_threshold * len(everyone) and previous in (None, everyone)
    return everyone if catch_up else active
