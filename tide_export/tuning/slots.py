"""Measures for how many sequences at once exits or drafts are faster than full depth.

The layers that one sequence skips another often needs in the same step, and what drafts save in readings of the weights
a batch saves too, so what they gain alone says nothing about several.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import LIST_PROMPT_TOKENS, Engine
from tide_export.runtime.scheduler import SchedulerLimits

ROUNDS = 5  # the median of which is taken
MIN_ROUNDS = 2
SECONDS = 30.0  # after which no further round begins


def slot_speedup(engine: Engine, modes: Sequence[GenerationConfig], prompts: Sequence[list[int]], slots: int) -> float:
    """Returns the speed of the second mode over the first's for so many sequences at once, on this machine, now.

    Both decode the same prompts with the same seeds and take turns step by step, so that other programs delay both.
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
    """Decodes with each mode, one step each in turn; returns the seconds of the steps after those that read prompts."""
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
