"""What every engine's sequences and batches have in common: lengths, the result of a step, and the step's contract.

`decoding` drives them: one sequence by `SingleSequence.step`, several by `Batch.step`. Sequences follow the rule in
docs/architecture/lazy-depth.md on every engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tide_export.errors import GenerationError

ROOM = 128  # tokens of K/V buffer beyond the prompt before the first growth
NO_LIMIT = 2**62  # more tokens than can ever be pending
NO_SCORES = np.zeros(0, np.float32)
NO_LOGITS = np.zeros((0, 0), np.float32)


class Candidates(NamedTuple):
    """The most likely token of one position, of equal ones the lowest id; or those with the largest logits, and all
    that have a logit equal to one of theirs."""

    tokens: np.ndarray  # int64 [c], ascending
    logits: np.ndarray  # float32 [c]


class StepResult(NamedTuple):
    """The result of one step for the last token of a sequence. Of a `SingleSequence`, the arrays are its buffers and
    change with the next step."""

    logits: np.ndarray  # float32 [V]
    position_logits: np.ndarray  # float32 [m, V], of the last m positions; m = 1 unless the last segment ran
    exit_layer: int  # layers the logits' hidden state went through; the model's depth without an exit
    segments_run: int  # segments 0 .. this-1 ran over the sequence in this step
    scores: np.ndarray = NO_SCORES  # float32 [K-1], NaN where the router was not reached or is off; empty in a batch
    candidates: Sequence[Candidates] = ()  # of the m positions, where `SequenceState.candidates` asked; then no logits

    @property
    def choice(self) -> np.ndarray | Candidates:
        """What the next token is chosen from."""
        return self.candidates[-1] if self.candidates else self.logits

    @property
    def choices(self) -> np.ndarray | Sequence[Candidates]:
        """What tokens are chosen from after each of the last m positions."""
        return self.candidates or self.position_logits


class ExitRule(NamedTuple):
    """When the tokens of a sequence exit, and how many of them may be pending."""

    thresholds: tuple[float, ...]  # float32, one per checkpoint
    max_pending: int

    @classmethod
    def of(cls, thresholds: Sequence[float], max_pending: int) -> "ExitRule":
        """Rounds thresholds as engines do."""
        return cls(tuple(np.asarray(thresholds, np.float32).tolist()), max_pending)


class SequenceState:
    """How far each segment has come in one sequence.

    Attributes:
        lengths: tokens in each segment's K/V buffers, shallowest first; never increasing with depth.
        candidates: how many of the largest logits of a position are enough for who reads them: engines may then give
            `StepResult.candidates`. 0: all.
    """

    candidates = 0

    def __init__(self, segments: int) -> None:
        self.lengths = [0] * segments

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def computed(self) -> list[int]:
        """Tokens of the sequence that each segment has run over."""
        return self.lengths

    @property
    def pending(self) -> list[int]:
        """Tokens pending before segment 1, 2, ... K-1."""
        return [before - after for before, after in zip(self.lengths, self.lengths[1:], strict=False)]

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`, as if they had never been stepped.

        Nothing is copied: what buffers hold beyond is overwritten before it is read.

        Raises:
            GenerationError: `length` is negative or more than the sequence has, or its K/V are propagated.
        """
        if not 0 <= length <= self.lengths[0]:
            raise GenerationError(f"a sequence of {self.lengths[0]} tokens cannot be rewound to {length}")
        self.lengths = [min(held, length) for held in self.lengths]


class SingleSequence(SequenceState, ABC):
    """One sequence that is stepped alone (`Engine.start`). Serves one thread at a time."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens the K/V buffers can hold now."""

    @abstractmethod
    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Uses other thresholds, one per checkpoint, from the next step on; pending tokens stay pending."""

    @abstractmethod
    def save(self) -> Any:
        """What `restore` needs to undo the steps after this call."""

    @abstractmethod
    def restore(self, saved: Any) -> None:
        """Undoes all steps since `saved`, also one that an exception (KeyboardInterrupt) ended at any point.

        Raises:
            GenerationError: the engine's memory cannot be brought back to that point.
        """

    @abstractmethod
    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        """Runs S new tokens; the result is about the last of them.

        Args:
            ids: S >= 1 token ids, each in [0, vocab_size).
            logits_to_keep: how many of the last positions get logits where the last segment runs, at least 1; no more
                than the tokens it runs over come.
            full: run every segment and let nothing exit, whatever the thresholds. Where K/V are propagated the first
                step is full, and every step of several tokens.

        Raises:
            GenerationError: no ids, more tokens than the model's context or the buffers hold, no memory, or the engine
                failed. The sequence is as it was before the step.
        """


class Batch(Protocol):
    """Several sequences, each in a slot (`Engine.start_batch`). Serves one thread at a time."""

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """The sequences by slot."""
        ...

    @property
    def free_slots(self) -> int: ...

    def join(self, thresholds: Sequence[float], max_pending: int) -> int:
        """The slot of a new, empty sequence.

        Args:
            thresholds, max_pending: of the sequence, as in `Backend.start`.
        """
        ...

    def leave(self, slot: int) -> None:
        """Frees a slot."""
        ...

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, StepResult]:
        """Runs each sequence's S >= 1 new token ids; the results are about the last of them.

        Args:
            new: token ids by slot, not necessarily of all sequences.
            logits_to_keep: by slot, how many of the last positions get logits where the last segment runs, at least 1;
                no more than the tokens it runs over come. The result is then that of full depth, also where the token
                could have exited and only caught up with others. A sequence without an entry has its own exit,
                whatever runs.
            full: slots of sequences that are run through every segment and of which nothing exits.

        Raises:
            GenerationError: no ids, more tokens than the model's context or the buffers hold, no memory, or the engine
                failed. The sequences are as they were before the step.
        """
        ...


@runtime_checkable
class KvBatch(Batch, Protocol):
    """A batch whose K/V can be copied out of a slot, and into another one."""

    def read_kv(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Copies the K/V of the tokens of a sequence from `start` to `stop`, which every segment holds: flat numbers.

        Raises:
            GenerationError: no memory.
        """
        ...

    def write_kv(self, slot: int, blocks: Sequence[np.ndarray], length: int) -> None:
        """Begins an empty sequence with `length` tokens, as if they had been stepped with `full`.

        Args:
            blocks: from `read_kv` of sequences with the same first tokens, in order; the last may hold more.

        Raises:
            GenerationError: no memory. The sequence is as it was.
        """
        ...


class Backend(Protocol):
    """One engine that runs a bundle's sequences and batches. Safe to use from several threads."""

    @property
    def provider(self) -> str:
        """Its name: cpu, cuda, tensorrt or tensorrt-rtx."""
        ...

    @property
    def max_batch_size(self) -> int:
        """Sequences that a batch can have; 1: there are no batches."""
        ...

    def start(self, thresholds: Sequence[float], max_pending: int, room: int = ROOM) -> SingleSequence:
        """An empty sequence.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them; `NEVER_EXIT` turns one off.
            max_pending: a segment is forced to run when more tokens than this would be pending before it.
            room: tokens of K/V buffer to have beyond the first step's, where buffers can grow.

        Raises:
            GenerationError: no memory for the sequence's buffers.
        """
        ...

    def start_batch(self, compaction_threshold: float, slots: int) -> Batch:
        """An empty batch.

        Args:
            compaction_threshold: when a smaller share of the sequences in a step than this needs a segment, only those
                run it; else all that have tokens pending before it do.
            slots: how many it shall have; at most `max_batch_size`.

        Raises:
            GenerationError: the bundle holds no networks for batches, or there is no memory.
        """
        ...


def check_step(ids: Sequence[int] | np.ndarray, length: int, limit: int | None) -> int:
    """Tokens of the sequence after a step over `ids` after `length` tokens.

    Raises:
        GenerationError: no ids, or more tokens than `limit`, the model's context.
    """
    total = length + len(ids)
    if total == length:
        raise GenerationError("a step needs at least one token")
    if limit is not None and total > limit:
        raise GenerationError(f"the sequence would have {total} tokens but the model's context holds {limit}")
    return total
