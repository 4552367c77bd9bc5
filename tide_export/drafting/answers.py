"""Generates a bundle's answers to prompts and stores them with the model's hidden states.

The bundle's own runtime generates them, so a drafter learns from the hidden states it will read, with their rounding.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tide_export.drafting import schedule
from tide_export.drafting.config import DraftConfig
from tide_export.drafting.prompts import Prompts, Request
from tide_export.drafting.store import AnswerStore
from tide_export.errors import DraftError
from tide_export.runtime.config import GenerationConfig

FIRST_BATCH = 32
MIN_BATCH, MAX_BATCH = 8, 256
BATCH_SECONDS = 30.0
MIN_NEW_TOKENS = 3  # the longest answer of the first batch needs as many; shorter ones leave nothing to draft


class Answered(Protocol):
    """The result of a generation with `states=True`."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def states(self) -> np.ndarray | None: ...


class AnswerEngine(Protocol):
    """The method of `runtime.engine.Engine` that answers a list of prompts."""

    def generate(self, ids: Sequence[Sequence[int]], config: GenerationConfig) -> Sequence[Answered]: ...


class Answerer:
    """Answers the prompts of this process in batches."""

    def __init__(self, engine: AnswerEngine, prompts: Prompts, store: AnswerStore, config: DraftConfig) -> None:
        self._engine, self._prompts, self._store, self._config = engine, prompts, store, config

    def answer_batch(self, seconds: float) -> None:
        """Answers the next prompts, for about `BATCH_SECONDS` or `seconds`, whichever is less.

        Raises:
            DraftError: the answers are too short to train on, hidden states are not finite, or they cannot be stored.
            GenerationError: the bundle cannot answer lists of prompts.
        """
        began = schedule.now()
        store, size = self._store, self._batch_size(seconds)
        requests = [self._prompts.request((store.answered + index) * store.count + store.rank) for index in range(size)]
        config = GenerationConfig(
            mode="full",
            temperature=self._config.temperature,
            max_new_tokens=self._config.max_new_tokens,
            seed=[request.seed for request in requests],
            states=True,
        )
        results = self._engine.generate([list(request.ids) for request in requests], config)
        answered = list[tuple[Request, Sequence[int], np.ndarray]]()
        for request, result in zip(requests, results, strict=True):
            hidden = result.states
            expected = (len(request.ids) + len(result.tokens) - 1, store.width)
            if hidden is None or hidden.shape != expected:
                shape = None if hidden is None else hidden.shape
                raise DraftError(f"the bundle's hidden states have shape {shape}, not {expected}: is it of this model?")
            if not np.isfinite(hidden).all():
                raise DraftError(
                    "the bundle's hidden states hold numbers that are not finite: `tide-export validate` checks it"
                )
            answered.append((request, result.tokens, hidden))
        if not store.answered and max(len(tokens) for _, tokens, _ in answered) < MIN_NEW_TOKENS:
            raise DraftError(
                f"the model answers each of the first {size} prompts with fewer than {MIN_NEW_TOKENS} tokens, so there "
                "is nothing to draft: give prompts that it answers at length with --prompts"
            )
        store.append(answered, schedule.now() - began)
        store.reload()

    def _batch_size(self, left: float) -> int:
        """Returns how many prompts take about `BATCH_SECONDS`, or `left` seconds if that is less."""
        if not self._store.answered or not self._store.seconds:
            return FIRST_BATCH
        rate = self._store.answered / self._store.seconds
        return max(MIN_BATCH, min(MAX_BATCH, math.ceil(min(left, BATCH_SECONDS) * rate)))
