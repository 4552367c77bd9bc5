"""Cases of tide_export's engine: one decode step of a sequence, or the prefill of a prompt."""

import time
from collections.abc import Sequence

import numpy as np

from harness.interleave import Case
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT

RESTART_AFTER = 48  # steps before a case returns to its context
CHUNK = 512  # tokens a context is read in: attention over thousands at once takes gigabytes
UNLIMITED = 1 << 20  # pending tokens


def tokens(count: int, vocab_size: int) -> list[int]:
    """`count` token ids; their values do not matter to the speed."""
    return (np.arange(1, count + 1) * 7919 % vocab_size).tolist()


def steps_after(context: int, limit: int | None) -> int:
    """Steps that a case may take after `context` tokens in a model of `limit` before it returns to the context.

    Raises:
        SystemExit: there is no room for any.
    """
    room = RESTART_AFTER if limit is None else min(RESTART_AFTER, (limit - context - 8) // 2)
    if room < 1:
        raise SystemExit(f"a context of {context} leaves no room to step in a model of {limit}: --stretch makes some")
    return room


class DecodeSteps:
    """Steps one sequence of an engine; rewinds it to its context when it has grown by more than `room` tokens."""

    def __init__(self, engine: Engine, context: Sequence[int]):
        self.engine, self.context = engine, list(context)
        self.off = [NEVER_EXIT] * len(engine.manifest.checkpoints)
        self.all_exit = [ALWAYS_EXIT] * len(engine.manifest.checkpoints)
        self.room = steps_after(len(self.context), engine.manifest.model.context_length)
        self.state = engine.start(self.off, UNLIMITED)
        for start in range(0, len(self.context), CHUNK):
            self.state.step(self.context[start : start + CHUNK])

    def step(self, thresholds: Sequence[float]) -> float:
        self.state.set_thresholds(thresholds)
        started = time.perf_counter()
        self.state.step([self.context[-1]])
        return time.perf_counter() - started

    def full(self) -> float:
        self._restart()
        return self.step(self.off)

    def first_exit(self) -> float:
        self._restart()
        return self.step(self.all_exit)

    def deep_over(self, tokens: int) -> Case:
        def case() -> float:
            self._restart()
            for _ in range(tokens - 1):
                self.step(self.all_exit)
            return self.step(self.off)

        return case

    def _restart(self) -> None:
        if self.state.length > len(self.context) + self.room:
            self.state.rewind(len(self.context))


def prefill_case(engine: Engine, prompt: Sequence[int], exits: bool = False, max_pending: int | None = None) -> Case:
    """A new sequence up to its first logits, memory for K/V included; with `exits` all exit at the first checkpoint."""
    thresholds = [ALWAYS_EXIT if exits else NEVER_EXIT] * len(engine.manifest.checkpoints)

    def case() -> float:
        started = time.perf_counter()
        engine.start(thresholds, max_pending).step(prompt)
        return time.perf_counter() - started

    return case


def logits_after(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    """Float32 [V] at full depth of the position after `ids`."""
    state = engine.start([NEVER_EXIT] * len(engine.manifest.checkpoints))
    for start in range(0, len(ids), CHUNK):
        logits = state.step(ids[start : start + CHUNK]).logits
    return logits.copy()
