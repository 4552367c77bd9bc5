"""Measures for how many sequences at once exits or drafts are faster than full depth.

The speed-up of one sequence does not hold for several: layers that one skips another often needs in the same step, and
a batch already shares the reads of the weights that drafts save.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import LIST_PROMPT_TOKENS, Engine
from tide_export.runtime.scheduler import SchedulerLimits

ROUNDS = 5
MIN_ROUNDS = 2
SECONDS = 30.0  # no round begins later


def slot_speedup(engine: Engine, modes: Sequence[GenerationConfig], prompts: Sequence[list[int]], slots: int) -> float:
    """Measures the speed of the second mode relative to the first with `slots` sequences at once.

    Both decode the same prompts with the same seeds; their steps are interleaved, so that other programs delay both.
    """
    started, ratios = time.perf_counter(), list[float]()
    _decode(engine, [replace(mode, max_new_tokens=2) for mode in modes], prompts, slots, 0)  # opens the networks
    while len(ratios) < MIN_ROUNDS or (len(ratios) < ROUNDS and time.perf_counter() - started < SECONDS):
        first, second = _decode(engine, modes, prompts, slots, len(ratios))
        ratios.append(first / second)
    return median(ratios)


def _decode(
    engine: Engine, modes: Sequence[GenerationConfig], prompts: Sequence[list[int]], slots: int, number: int
) -> list[float]:
    """Decodes with each mode, steps interleaved; returns each mode's seconds after the prompt."""
    schedulers = [engine.scheduler(SchedulerLimits(slots=slots, prompt_tokens=LIST_PROMPT_TOKENS)) for _ in modes]
    for scheduler, mode in zip(schedulers, modes, strict=True):
        for slot in range(slots):
            scheduler.submit(prompts[(number + slot) % len(prompts)], mode, seed=number * slots + slot)
    seconds = [0.0] * len(modes)
    reading, active = True, [True] * len(modes)
    while any(active):
        for index, scheduler in enumerate(schedulers):
            started = time.perf_counter()
            active[index] = scheduler.step()
            seconds[index] += 0.0 if reading else time.perf_counter() - started
        reading = False
    return seconds
