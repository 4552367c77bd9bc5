"""Steps sequences and batches by hand (`Engine.start`, `Engine.start_batch`)."""

import ctypes
import json
from collections.abc import Collection, Mapping, Sequence
from ctypes import c_int64, c_size_t
from itertools import pairwise
from typing import NamedTuple, Unpack

import numpy as np

from tide_export.common.values import whole_number
from tide_export.runtime.config import GenerationOptions
from tide_export.runtime.native import Owned, SlotStep, Step, call, doubles, floats_at, library
from tide_export.runtime.request import prompt_ids

NO_LIMIT = 2**62  # more tokens than can ever be pending
NO_SCORES = np.zeros(0, np.float32)


class StepResult(NamedTuple):
    """The result of one step for the last token of a sequence."""

    logits: np.ndarray  # float32 [V]
    position_logits: np.ndarray  # float32 [m, V], of the last m positions; m = 1 unless the last segment ran
    exit_layer: int  # layers before the logits; the model's depth without an exit
    segments_run: int  # segments 0 .. segments_run-1 ran over the sequence in this step
    scores: np.ndarray = NO_SCORES  # float32 [K-1], NaN where the router decided nothing; empty in a batch


class SequenceState:
    """Counts the tokens that each segment has processed in one sequence."""

    def __init__(self, segments: int) -> None:
        self._lengths = (c_int64 * segments)()

    @property
    def lengths(self) -> list[int]:
        """Tokens in each segment's K/V buffers, shallowest first; never increasing with depth."""
        self._read()
        return list(self._lengths)

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.lengths[0]

    @property
    def pending(self) -> list[int]:
        """Tokens pending before each of the segments 1 to K-1."""
        lengths = self.lengths
        return [before - after for before, after in pairwise(lengths)]

    def rewind(self, length: int) -> None:
        """Removes all tokens but the first `length`, as if they had never been stepped.

        Raises:
            GenerationError: `length` is negative or longer than the sequence.
        """
        raise NotImplementedError

    def _read(self) -> None:
        raise NotImplementedError


class SingleSequence(SequenceState):
    """Steps one sequence alone.

    Serves one thread at a time. A method that raises leaves the sequence unchanged.
    """

    def __init__(self, handle: Owned, segments: int, checkpoints: int) -> None:
        """Wraps a tide_sequence."""
        super().__init__(segments)
        self._handle, self._checkpoints = handle, checkpoints

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Sets other thresholds, one per checkpoint, from the next step on; pending tokens stay pending."""
        call("sequence_set_thresholds", self._handle, doubles(thresholds), len(thresholds))

    def step(self, ids: Sequence[int] | np.ndarray, logits_to_keep: int = 1, full: bool = False) -> StepResult:
        """Runs S new tokens; the result is that of the last one.

        Args:
            ids: S >= 1 token ids, each in [0, vocab_size).
            logits_to_keep: number of last positions, 1 or more, that get logits if the last segment runs; at most the
                tokens that it runs over.
            full: run every segment and let no token exit, whatever the thresholds.

        Raises:
            GenerationError: there are no ids, or more tokens than the model's context or the buffers hold; memory ran
                out; or the engine failed.
        """
        new, step = prompt_ids(ids, "a step"), Step()
        call("sequence_step", self._handle, new.ctypes.data, len(new), logits_to_keep, full, ctypes.byref(step))
        return _result(step, self._checkpoints)

    def rewind(self, length: int) -> None:
        call("sequence_rewind", self._handle, length)

    def _read(self) -> None:
        call("sequence_lengths", self._handle, self._lengths)


def encoded(name: str | None) -> bytes | None:
    """Returns the name of an adapter as the library takes it."""
    return None if name is None else name.encode()


class Batch:
    """Steps several sequences together, each in a slot.

    Serves one thread at a time. A method that raises leaves the sequences unchanged.
    """

    def __init__(self, handle: Owned, segments: int) -> None:
        """Wraps a tide_batch."""
        self._handle, self._segments = handle, segments
        self._sequences: dict[int, _Slot] = {}

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """The sequences by slot."""
        return self._sequences

    @property
    def free_slots(self) -> int:
        return library().tide_batch_free_slots(self._handle)

    def join(self, thresholds: Sequence[float], max_pending: int, adapter: str | None = None) -> int:
        """Adds an empty sequence and returns its slot; the arguments are those of `Engine.start`."""
        slot, limit = c_size_t(), whole_number("max_pending", max_pending, minimum=0)
        arguments = doubles(thresholds), len(thresholds), limit, encoded(adapter), ctypes.byref(slot)
        call("batch_join", self._handle, *arguments)
        self._sequences[slot.value] = _Slot(self._handle, slot.value, self._segments)
        return slot.value

    def leave(self, slot: int) -> None:
        """Frees a slot."""
        call("batch_leave", self._handle, slot)
        del self._sequences[slot]

    def step(
        self,
        new: Mapping[int, Sequence[int] | np.ndarray],
        logits_to_keep: Mapping[int, int] | None = None,
        full: Collection[int] = (),
    ) -> dict[int, StepResult]:
        """Runs S >= 1 new tokens of each sequence given; each result is that of its last token.

        Args:
            new: token ids by slot; sequences without an entry do not run.
            logits_to_keep: number of last positions, by slot, that get logits if the last segment runs, as in
                `SingleSequence.step`; the result is then that of full depth, even if the token could have exited. A
                sequence without an entry gets the logits of its exit.
            full: slots of sequences that run every segment and of which no token exits.

        Raises:
            GenerationError: there are no ids, or more tokens than the model's context or the buffers hold; memory ran
                out; or the engine failed.
        """
        slots = sorted(new)
        ids = [prompt_ids(new[slot], "a step") for slot in slots]
        keep = [whole_number("logits_to_keep", (logits_to_keep or {}).get(slot, 0), minimum=0) for slot in slots]
        parts, results = (SlotStep * len(slots))(), (Step * len(slots))()
        for part, slot, tokens, kept in zip(parts, slots, ids, keep, strict=True):
            part.slot, part.ids, part.count = slot, tokens.ctypes.data, len(tokens)
            part.logits_to_keep, part.full = kept, slot in full
        call("batch_step", self._handle, parts, len(slots), results)
        return {slot: _result(step, 0) for slot, step in zip(slots, results, strict=True)}


class _Slot(SequenceState):
    def __init__(self, batch: Owned, slot: int, segments: int) -> None:
        super().__init__(segments)
        self._batch, self._slot = batch, slot

    def rewind(self, length: int) -> None:
        call("batch_rewind", self._batch, self._slot, length)

    def _read(self) -> None:
        call("batch_lengths", self._batch, self._slot, self._lengths)


def _result(step: Step, checkpoints: int) -> StepResult:
    """Copies the result of a step out of the library's memory, which the next step may free."""
    rows = floats_at(step.logits, step.rows, step.vocabulary)
    return StepResult(rows[-1], rows, step.exit_layer, step.segments_run, floats_at(step.scores, checkpoints))


def sample(logits: np.ndarray, position: int = 0, **options: Unpack[GenerationOptions]) -> int:
    """Chooses a token from logits [V] as a generation with these options does.

    Args:
        position: index of the token in its sequence; the prompt's first is 0.
        options: those of sampling, and the seed; fields of `GenerationConfig` by name.

    Raises:
        GenerationError: an option is out of range, or the logits are not finite because the model is broken.
    """
    values, token = np.ascontiguousarray(logits, np.float32), c_int64()
    encoded = json.dumps({name: value for name, value in options.items() if value is not None}).encode()
    call("sample", encoded, position, values.ctypes.data, len(values), ctypes.byref(token))
    return token.value
