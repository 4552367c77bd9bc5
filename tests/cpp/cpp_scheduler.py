"""The scheduler of the C++ runtime with the interface of Python's, so that a test can run on both."""

from collections.abc import Sequence
from typing import Any

from cpp_engine import CppEngine, words

from tide_export.runtime.generation import Generation
from tide_export.runtime.stats import ExitStats
from tide_export.runtime.scheduler import SchedulerLimits


class CppScheduler:
    """The scheduler of an engine's driver, of which there is one at a time."""

    def __init__(self, engine: CppEngine, limits: SchedulerLimits) -> None:
        self._engine = engine
        values = (limits.slots, limits.prompt_tokens, limits.waiting, limits.kv_tokens, limits.prefix_cache_bytes)
        engine.call("schedule_open", *("none" if value is None else str(value) for value in values))

    def submit(self, ids: Sequence[int], timeout: float | None = None, **options: Any) -> "CppHandle":
        request = words(ids=list(ids) or None, **options)
        return CppHandle(self._engine, self._engine.call("schedule_submit", str(timeout).lower(), *request))

    def step(self) -> bool:
        return self._engine.call("schedule_step")

    def start(self) -> "CppScheduler":
        self._engine.call("schedule_start")
        return self

    def close(self, drain: bool = True) -> None:
        self._engine.call("schedule_close", str(int(drain)))

    @property
    def waiting(self) -> int:
        return self._engine.call("schedule_counts")["waiting"]

    @property
    def running(self) -> int:
        return self._engine.call("schedule_counts")["running"]

    @property
    def prefix_cache_bytes(self) -> int:
        return self._engine.call("schedule_counts")["prefix_cache_bytes"]


class CppHandle:
    def __init__(self, engine: CppEngine, number: int) -> None:
        self._engine, self._number = engine, str(number)

    def cancel(self) -> None:
        self._engine.call("schedule_cancel", self._number)

    def result(self) -> Generation:
        return self._engine.generation(self._engine.call("schedule_result", self._number))

    def __next__(self) -> int:
        token = self._engine.call("schedule_next", self._number)
        if token is None:
            raise StopIteration
        return token

    @property
    def tokens(self) -> list[int]:
        return self.described()["tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.described()["cached_tokens"]

    @property
    def finish_reason(self) -> str | None:
        return self.described()["finish_reason"]

    @property
    def stats(self) -> ExitStats:
        return self._engine.generation(self.described()).stats

    def described(self) -> dict[str, Any]:
        return self._engine.call("schedule_describe", self._number)
