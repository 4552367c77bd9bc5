"""Sequences and batches of one engine, stepped by the numbers that a test gives its sequences."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tide_export.errors import GenerationError
from tide_export.runtime.sequence import StepResult

New = Mapping[int, list[int]]  # tokens by the number of a sequence


class Singles:
    """Sequences of one engine that are stepped one after the other.

    Attributes:
        checks_ids: whether a token id outside the vocabulary is an error at once.
    """

    def __init__(
        self, start: Callable[[Sequence[float], int], Any], segment_of: Any = None, checks_ids: bool = True
    ) -> None:
        """`segment_of`: as in `Batched`, of a sequence."""
        self._start, self._segment_of, self.checks_ids = start, segment_of, checks_ids
        self._sequences: dict[int, Any] = {}

    def begin(self, thresholds: Sequence[float], max_pending: int, compaction_threshold: float) -> None:
        self._sequences.clear()
        self._options = thresholds, max_pending

    def join(self, number: int) -> None:
        self._sequences[number] = self._start(*self._options)

    def leave(self, number: int) -> None:
        del self._sequences[number]

    def sequence(self, number: int) -> Any:
        return self._sequences[number]

    def step(self, new: New, keep: Mapping[int, int], full: Collection[int]) -> Iterator[tuple[int, StepResult]]:
        for n, ids in new.items():
            yield n, self._sequences[n].step(ids, keep.get(n, 1), n in full)

    def failing(self, number: int, k: int) -> Any:
        """A context in which segment k of a sequence's step runs and then fails; None where that cannot be made."""
        return None if self._segment_of is None else _failing(self._segment_of(self._sequences[number], k))


class Batched:
    """Sequences of one engine in a batch."""

    def __init__(self, start: Callable[[float], Any], segment_of: Any = None, checks_ids: bool = True) -> None:
        """`segment_of`: gives, of a batch and k, what may run segment k: objects, the names of their methods, and k if
        that is the method's first argument, else None."""
        self._start, self._segment_of, self.checks_ids = start, segment_of, checks_ids
        self._slots: dict[int, int] = {}

    def begin(self, thresholds: Sequence[float], max_pending: int, compaction_threshold: float) -> None:
        self._slots.clear()
        self._batch = None  # so that its buffers serve the next one
        self._batch = self._start(compaction_threshold)
        self._rule = thresholds, max_pending

    def join(self, number: int) -> None:
        free = self._batch.free_slots
        self._slots[number] = self._batch.join(*self._rule)
        assert self._batch.free_slots == free - 1

    def leave(self, number: int) -> None:
        self._batch.leave(self._slots.pop(number))
        assert set(self._batch.sequences) == set(self._slots.values())

    def sequence(self, number: int) -> Any:
        return self._batch.sequences[self._slots[number]]

    def step(self, new: New, keep: Mapping[int, int], full: Collection[int]) -> list[tuple[int, StepResult]]:
        slots = self._slots
        results = self._batch.step(
            {slots[n]: ids for n, ids in new.items()},
            logits_to_keep={slots[n]: count for n, count in keep.items()},
            full={slots[n] for n in full},
        )
        assert results.keys() == {slots[n] for n in new}
        return [(n, results[slots[n]]) for n in new]

    def failing(self, number: int, k: int) -> Any:
        return None if self._segment_of is None else _failing(self._segment_of(self._batch, k))


@contextmanager
def _failing(methods: Iterable[tuple[Any, str, int | None]]) -> Iterator[None]:
    """Lets methods fail after they have run; of segment k, their first argument, unless that is None."""
    with ExitStack() as stack:
        for owner, method, k in methods:
            stack.enter_context(patch.object(owner, method, _runs_and_fails(getattr(owner, method), k)))
        yield


def _runs_and_fails(run: Callable[..., Any], k: int | None) -> Callable[..., None]:
    def runs_and_fails(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        if k is None or arguments[0] == k:
            raise GenerationError("injected")

    return runs_and_fails
