"""Sequences and batches that are stepped by hand (`Engine.start`, `Engine.start_batch`)."""

import ctypes
import json
from collections.abc import Collection, Mapping, Sequence
from ctypes import c_int64, c_size_t
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tide_export.runtime.native import Owned, SlotStep, Step, call, doubles, floats_at, library
from tide_export.runtime.request import prompt_ids
from tide_export.values import whole_number

NO_LIMIT = 2**62  # more tokens than can ever be pending
NO_SCORES = np.zeros(0, np.float32)


class StepResult(NamedTuple):
    """The result of one step for the last token of a sequence."""

    logits: np.ndarray  # float32 [V]
    position_logits: np.ndarray  # float32 [m, V], of the last m positions; m = 1 unless the last segment ran
    exit_layer: int  # layers the logits' hidden state went through; the model's depth without an exit
    segments_run: int  # segments 0 .. this-1 ran over the sequence in this step
    scores: np.ndarray = NO_SCORES  # float32 [K-1], NaN where the router was not reached or is off; empty in a batch


class SequenceState:
    """How far each segment has come in one sequence."""

    def __init__(self, segments: int) -> None:
        self._lengths, self._computed = (c_int64 * segments)(), (c_int64 * segments)()

    @property
    def lengths(self) -> list[int]:
        """Tokens in each segment's K/V buffers, shallowest first; never increasing with depth."""
        self._read()
        return list(self._lengths)

    @property
    def computed(self) -> list[int]:
        """Tokens of the sequence that each segment has run over."""
        self._read()
        return list(self._computed)

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.lengths[0]

    @property
    def pending(self) -> list[int]:
        """Tokens pending before segment 1, 2, ... K-1."""
        lengths = self.lengths
        return [before - after for before, after in pairwise(lengths)]

    def rewind(self, length: int) -> None:
        """Forgets all tokens but the first `length`, as if they had never been stepped.

        Raises:
            GenerationError: `length` is negative or more than the sequence has, or its K/V are propagated.
        """
        raise NotImplementedError

    def _read(self) -> None:
        raise NotImplementedError


class SingleSequence(SequenceState):
    """One sequence that is stepped alone. Serves one thread at a time; where a method raises, the sequence is as it was
    before the call."""

    def __init__(self, handle: Owned, segments: int, checkpoints: int) -> None:
        """Takes a tide_sequence."""
        super().__init__(segments)
        self._handle, self._checkpoints = handle, checkpoints

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Uses other thresholds, one per checkpoint, from the next step on; pending tokens stay pending."""
        call("sequence_set_thresholds", self._handle, doubles(thresholds), len(thresholds))

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
                failed.
        """
        new, step = prompt_ids(ids, "a step"), Step()
        call("sequence_step", self._handle, new.ctypes.data, len(new), logits_to_keep, full, ctypes.byref(step))
        return _result(step, self._checkpoints)

    def rewind(self, length: int) -> None:
        call("sequence_rewind", self._handle, length)

    def _read(self) -> None:
        library().tide_sequence_lengths(self._handle, self._lengths, self._computed)


class Batch:
    """Several sequences, each in a slot. Serves one thread at a time; where a method raises, the sequences are as they
    were before the call."""

    def __init__(self, handle: Owned, segments: int) -> None:
        """Takes a tide_batch."""
        self._handle, self._segments = handle, segments
        self._sequences: dict[int, _Slot] = {}

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """The sequences by slot."""
        return self._sequences

    @property
    def free_slots(self) -> int:
        return library().tide_batch_free_slots(self._handle)

    def join(self, thresholds: Sequence[float], max_pending: int) -> int:
        """Adds an empty sequence and returns its slot; the arguments are those of `Engine.start`."""
        slot, limit = c_size_t(), whole_number("max_pending", max_pending, minimum=0)
        call("batch_join", self._handle, doubles(thresholds), len(thresholds), limit, ctypes.byref(slot))
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
                failed.
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
    """One sequence of a batch."""

    def __init__(self, batch: Owned, slot: int, segments: int) -> None:
        super().__init__(segments)
        self._batch, self._slot = batch, slot

    def rewind(self, length: int) -> None:
        call("batch_rewind", self._batch, self._slot, length)

    def _read(self) -> None:
        call("batch_lengths", self._batch, self._slot, self._lengths, self._computed)


def _result(step: Step, checkpoints: int) -> StepResult:
    """Copies the result of a step out of the library's memory, which the next step may free."""
    rows = floats_at(step.logits, step.rows, step.vocabulary)
    return StepResult(rows[-1], rows, step.exit_layer, step.segments_run, floats_at(step.scores, checkpoints))


def sample(
    logits: np.ndarray,
    position: int = 0,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
) -> int:
    """Chooses a token from logits [V] as a generation with these options does.

    Args:
        position: of the token in its sequence, the prompt's first being at 0.
        temperature, top_k, top_p, min_p, seed: see `GenerationConfig`.

    Raises:
        GenerationError: an option is out of range, or the logits are not finite, so the model is broken.
    """
    values, token = np.ascontiguousarray(logits, np.float32), c_int64()
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    given = json.dumps({name: value for name, value in options.items() if value is not None}).encode()
    call("sample", given, position, values.ctypes.data, len(values), ctypes.byref(token))
    return token.value
