"""The speed of exits for several sequences at once: what is timed, and what a real engine gives."""

import statistics
from pathlib import Path
from typing import Any, cast

import pytest

from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.tuning import slots
from tide_export.tuning.slots import slot_speedup

MODES = [GenerationConfig(mode=mode, temperature=0.8, stop_token_ids=(), max_new_tokens=6) for mode in ("full", "exit")]
COST = {"full": 0.3, "exit": 0.2}  # seconds of a step


class Clock:
    """Stands in for an engine, whose steps take the time of their mode, those that read prompts 100 seconds."""

    def __init__(self) -> None:
        self.now, self.requests, self.steps = 0.0, list[Any](), list[str]()

    def scheduler(self, limits: SchedulerLimits) -> "Steps":
        return Steps(self, limits)


class Steps:
    def __init__(self, clock: Clock, limits: SchedulerLimits) -> None:
        self.clock, self.limits, self.mode, self.left = clock, limits, "", 0

    def submit(self, prompt: list[int], config: GenerationConfig, seed: int) -> None:
        self.mode, self.left, self.fresh = config.mode, config.max_new_tokens, True
        self.clock.requests.append((self.limits.slots, config.mode, tuple(prompt), seed))

    def step(self) -> bool:
        if self.left == 0:
            return False
        self.clock.steps.append(self.mode)
        self.clock.now += 100.0 if self.fresh else COST[self.mode]
        self.left, self.fresh = self.left - 1, False
        return True


def test_modes_take_turns_on_equal_requests_and_prompts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock()
    monkeypatch.setattr(slots.time, "perf_counter", lambda: clock.now)
    assert slot_speedup(clock, MODES, [[1], [2], [3]], 4) == pytest.approx(1.5)
    assert {count for count, *_ in clock.requests} == {4}
    full, exits = ([request[2:] for request in clock.requests if request[1] == mode] for mode in ("full", "exit"))
    assert full == exits
    rounds = len(full) // 4 - 1  # without the one that opens the networks
    assert rounds == slots.MIN_ROUNDS, "each took longer than there is time for"
    assert [prompt for prompt, _ in full[4:8]] == [(1,), (2,), (3,), (1,)]
    assert len({seed for _, seed in full[4:]}) == 4 * rounds
    assert clock.steps == ["full", "exit"] * (len(clock.steps) // 2)


def test_a_round_that_was_delayed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([[9.0, 1.0], [1.1, 1.0], [1.2, 1.0], [0.1, 1.0], [1.3, 1.0], [1.2, 1.0]])  # the first is not taken
    monkeypatch.setattr(slots, "_decode", lambda *_: next(ratios))
    assert slot_speedup(cast(Any, None), MODES, [[1]], 2) == statistics.median([1.1, 1.2, 0.1, 1.3, 1.2])


def test_it_runs_on_an_engine(demo_bundle: Path) -> None:
    assert 0.1 < slot_speedup(load(demo_bundle, threads=1), MODES, [[5, 9, 2], [7]], 2) < 10
