"""Not a test: puts a load on one engine and compares every result with a serial run.

    python load_run.py BUNDLE SECONDS THREADS SEED

Threads draw requests of all modes: prompts and lists of prompts, read to the end, dropped half-read, or hit by an
exception that is raised in the thread from outside, anywhere. Prints figures as JSON, violations among them.
"""

import ctypes
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_export.runtime.engine import Engine, load

REQUESTS = 60
THROWS_PER_SECOND = 20
PATIENCE = 60  # seconds
WARM_UP = 0.3  # of the time, after which memory is expected to be flat
MODES = ("full", "exit", "lossless")
KINDS = [f"{mode}{way}" for mode in MODES for way in ("", " dropped", " lists")] + ["exceptions thrown in"]


class Thrown(BaseException):
    """Raised in a thread from outside, as KeyboardInterrupt is."""


@dataclass(frozen=True)
class Request:
    """Prompts (one, or a list), options, and the tokens of a serial run."""

    prompts: Any
    options: dict[str, Any]
    expected: Any

    @property
    def is_list(self) -> bool:
        return isinstance(self.prompts[0], list)


def main() -> None:
    bundle, seconds, threads, seed = sys.argv[1:]
    engine = load(Path(bundle), threads=1)
    print(json.dumps(Load(engine, int(seed)).run(float(seconds), int(threads)), indent=2))


class Load:
    """Requests with their serial results, and the threads that repeat them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.seed = engine, seed
        draw = random.Random(seed)
        self.requests = [self._request(draw, number) for number in range(REQUESTS)]
        self.counts: list[Counter[str]] = []
        self.violations: list[str] = []
        self.memory: list[float] = []
        self.over = threading.Event()

    def run(self, seconds: float, threads: int) -> dict[str, Any]:
        """Keeps `threads` busy for `seconds`, and longer until there is one of each kind; prints the figures so far to
        stderr every minute."""
        before, started = (threading.active_count(), open_files()), time.monotonic()
        self.counts = [Counter() for _ in range(threads)]
        workers = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(threads)]
        draw = random.Random(self.seed)
        for worker in workers:
            worker.start()
        printed = 0.0
        while not self._is_over(now := time.monotonic() - started, seconds):
            time.sleep(1 / THROWS_PER_SECOND)
            throw_in(draw.choice(workers))
            self.memory.append(resident_mib())
            if now > printed + 60:
                printed = now
                print(json.dumps(self._figures(now)), file=sys.stderr, flush=True)
        self.over.set()
        for worker in workers:
            worker.join(120)
        return {
            **self._figures(time.monotonic() - started),
            "stuck threads": sum(worker.is_alive() for worker in workers),
            "more threads after": threading.active_count() - before[0],
            "more open files after": open_files() - before[1],
        }

    def _is_over(self, now: float, seconds: float) -> bool:
        every = now > seconds + PATIENCE or all(sum(self.counts, Counter())[kind] for kind in KINDS)
        return bool(self.violations) or (now > seconds and every)

    def _figures(self, seconds: float) -> dict[str, Any]:
        flat = self.memory[int(WARM_UP * len(self.memory)) :]
        part = max(1, len(flat) // 4)
        return {
            **sum(self.counts, Counter()),
            "seconds": round(seconds),
            "threads": len(self.counts),
            "violations": self.violations,
            "MiB after warm-up": round(sum(flat[:part]) / part, 1),
            "MiB at the end": round(sum(flat[-part:]) / part, 1),
            "MiB at most": round(max(flat), 1),
        }

    def _request(self, draw: random.Random, number: int) -> Request:
        """One of each kind in turn, computed alone."""
        vocabulary = self.engine.manifest.model.vocab_size
        mode = MODES[number % 3]
        options: dict[str, Any] = {"mode": mode, "max_new_tokens": draw.randint(4, 24)}
        if mode == "exit":
            options |= {"threshold": draw.choice([0.3, 0.5, 0.7, 0.9]), "min_layers": 1}
        if number % 4 == 3:
            options |= {"temperature": 0.8, "top_k": 50, "seed": number}

        def prompt() -> list[int]:
            return [draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))]

        if number % 5 == 4:
            prompts = [prompt() for _ in range(draw.randint(2, 10))]
            return Request(prompts, options, [one.tokens for one in self.engine.generate(prompts, **options)])
        ids = prompt()
        return Request(ids, options, self.engine.generate(ids, **options).tokens)

    def _work(self, number: int) -> None:
        draw, counts = random.Random(f"{self.seed} {number}"), self.counts[number]
        while not self.over.is_set():
            try:
                while not self.over.is_set():
                    self._serve(draw, counts)
            except Thrown:
                counts["exceptions thrown in"] += 1
            except BaseException as error:
                self.violations.append(f"{type(error).__name__}: {error}")

    def _serve(self, draw: random.Random, counts: Counter[str]) -> None:
        request = draw.choice(self.requests)
        expected, kind = request.expected, request.options["mode"]
        if request.is_list:
            found = [one.tokens for one in self.engine.generate(request.prompts, **request.options)]
            kind += " lists"
            counts["tokens"] += sum(map(len, found))
        else:
            found, stream = [], self.engine.stream(request.prompts, **request.options)
            until = draw.randrange(len(expected)) if draw.random() < 0.3 else len(expected) + 1
            for token in stream:
                found.append(token)
                if len(found) > until:
                    kind += " dropped"
                    expected = expected[: len(found)]
                    break
            counts["tokens"] += len(found)
        if found != expected:
            self.violations.append(f"{kind} {request.options}: {found} instead of {expected}")
        counts[kind] += 1


def throw_in(thread: threading.Thread) -> None:
    """Raises `Thrown` in a thread, at whatever it does."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Thrown))


def resident_mib() -> float:
    """Physical memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


if __name__ == "__main__":
    main()
