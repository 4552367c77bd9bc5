"""Sequences and batches of one engine, stepped by the numbers that a test gives its sequences."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tide_export.names.networks import segment_name
from tide_export.runtime.stepping import StepResult

New = Mapping[int, list[int]]  # tokens by the number of a sequence


class Singles:
    """Sequences of one engine that are stepped one after the other.

    Attributes:
        checks_ids: whether a token id outside the vocabulary is an error at once.
    """

    def __init__(self, start: Callable[[Sequence[float], int], Any], networks: Any = None) -> None:
        """`networks`: that the caller runs (`caller_networks.CallersNetworks`), if they are."""
        self._start, self._networks, self.checks_ids = start, networks, True
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
        return None if self._networks is None else _failing(self._networks, k)


class Batched:
    """Sequences of one engine in a batch."""

    def __init__(self, start: Callable[[float], Any], networks: Any = None) -> None:
        """`networks`: as of `Singles`."""
        self._start, self._networks, self.checks_ids = start, networks, True
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
        return None if self._networks is None else _failing(self._networks, k)


@contextmanager
def _failing(networks: Any, k: int) -> Iterator[None]:
    networks.failing_once(segment_name(k))
    try:
        yield
    finally:
        networks.after = lambda run, tensors: None
