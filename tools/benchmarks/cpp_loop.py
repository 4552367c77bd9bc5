"""Times a token in the Python loop and in the C++ loop, on one bundle, interleaved.

    python tools/benchmarks/cpp_loop.py BUNDLE PROGRAM [--sequences 1,8] [--rounds 9] [--new-tokens 96] [--json FILE]

PROGRAM is `tide_generate` of `cmake --preset runtime` (docs/guide/cpp.md). Each round decodes the same tokens with
both, one thread, at full depth and with exits, in random order; both drive the same graph in the same library. With
--sequences prompts are decoded in batches, on the networks for batches; the time of a token is then a step's time
divided by their number. The part of Python's time outside its calls to ONNX Runtime is shown too. The tokens of both
must be equal.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness.interleave import write_json
from tide_export.runtime.branched.backend import BranchedBackend
from tide_export.runtime.sequence import Batch

from tide_export.formatting import table
from tide_export.runtime.engine import Engine, load

CASES: dict[str, dict[str, Any]] = {"full": {"mode": "full"}, "exit at 0.5": {"mode": "exit", "threshold": 0.5}}
PYTHON, CPP, INSIDE = "Python", "C++", "inside ONNX Runtime"


class Clock:
    """Adds up the time that the runs of some sessions take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def after_the_first(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step` that begins to count anew after its first call, which runs over the prompts."""
        calls = 0

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            result, calls = step(*arguments, **options), calls + 1
            if calls == 1:
                self.seconds = 0.0
            return result

        return counted

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = run(*arguments)
            self.seconds += time.perf_counter() - started
            return result

        return timed


class Timed:
    """A session whose runs a clock adds up."""

    def __init__(self, session: Any, clock: Clock) -> None:
        self._session = session
        self.run, self.run_with_iobinding = clock.timed(session.run), clock.timed(session.run_with_iobinding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class TimedEngine(Engine):
    """An engine whose batches are timed after the step over their prompts."""

    clock: Clock

    def start_batch(self, *arguments: Any) -> Batch:
        batch = super().start_batch(*arguments)
        setattr(batch, "step", self.clock.after_the_first(batch.step))  # noqa: B010  mypy refuses methods
        return batch


def timed_engine(bundle: str, clock: Clock, max_batch_size: int) -> Engine:
    """An engine of one thread, with its networks for `max_batch_size` sequences open where that is more than one."""
    loaded = load(bundle, "cpu", threads=1, verify=False)
    assert isinstance(loaded.backend, BranchedBackend)
    backend = BranchedBackend(loaded.bundle, Timed(loaded.backend.session, clock), threads=1)
    engine = TimedEngine(loaded.bundle, backend)
    engine.clock = clock
    if max_batch_size > 1:
        opened = backend.batch_networks.sessions(max_batch_size)
        segments = tuple(Timed(one, clock) for one in opened.segments)
        skipped = {k: Timed(one, clock) for k, one in opened.skipped.items()}
        timed = replace(opened, segments=segments, head=Timed(opened.head, clock), skipped=skipped)
        backend.batch_networks._opened = timed
    return engine


Tokens = list[list[int]]


def run_python(engine: Engine, clock: Clock, prompts: Tokens, count: int, case: str) -> tuple[Tokens, dict[str, float]]:
    """The tokens, and milliseconds per token after the first ones, with those inside ONNX Runtime."""
    per_token = 1000 / (count - 1) / len(prompts)
    if len(prompts) == 1:
        stream = engine.stream(prompts[0], max_new_tokens=count, stop_token_ids=[], **CASES[case])
        tokens = [next(stream)]
        clock.seconds = 0.0
        tokens += stream
        return [tokens], {PYTHON: stream.stats.decode_seconds * per_token, INSIDE: clock.seconds * per_token}
    made = engine.generate(prompts, max_new_tokens=count, stop_token_ids=[], **CASES[case])
    decoding = max(one.stats.decode_seconds for one in made) * per_token
    return [one.tokens for one in made], {PYTHON: decoding, INSIDE: clock.seconds * per_token}


def run_cpp(program: str, bundle: str, prompts: Tokens, count: int, case: str) -> tuple[Tokens, dict[str, float]]:
    options = [word for name, value in CASES[case].items() for word in (f"--{name}", str(value))]
    given = [word for prompt in prompts for word in ("--ids", ",".join(map(str, prompt)))]
    line = [program, bundle, *given, "--max-new-tokens", str(count), *options]
    line += ["--ignore-eos", "--threads", "1", "--no-verify"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"'{program}' ended with {done.returncode}")
    answer = json.loads(done.stdout)
    made = answer["sequences"] if len(prompts) > 1 else [answer]
    seconds = max(one["stats"]["decode_seconds"] for one in made)
    return [one["tokens"] for one in made], {CPP: seconds * 1000 / (count - 1) / len(prompts)}


def title(case: str, sequences: int) -> str:
    return case if sequences == 1 else f"{case}, {sequences} in a batch"


def measure(
    bundle: str, program: str, rounds: int, count: int, sizes: Sequence[int] = (1,)
) -> dict[str, dict[str, float]]:
    """By case and number of sequences: median milliseconds per token of each loop, and inside ONNX Runtime."""
    taken: dict[str, dict[str, list[float]]] = {}
    clocks = {size: Clock() for size in sizes}
    engines = {size: timed_engine(bundle, clock, size) for size, clock in clocks.items()}  # idle slots are not free
    vocabulary = engines[sizes[0]].manifest.model.vocab_size
    prompts = [[((i + 64 * number) * 7919) % vocabulary for i in range(1, 65)] for number in range(max(sizes))]
    pairs = [(case, size) for case in CASES for size in sizes]
    for _ in range(rounds):
        for case, size in random.sample(pairs, len(pairs)):
            both: list[Callable[[], tuple[Tokens, dict[str, float]]]] = [
                partial(run_python, engines[size], clocks[size], prompts[:size], count, case),
                partial(run_cpp, program, bundle, prompts[:size], count, case),
            ]
            made = [run() for run in random.sample(both, 2)]
            if made[0][0] != made[1][0]:
                raise SystemExit(f"the two runtimes disagree about the tokens of '{title(case, size)}'")
            for _, times in made:
                for name, milliseconds in times.items():
                    taken.setdefault(title(case, size), {}).setdefault(name, []).append(milliseconds)
    order = [title(case, size) for case, size in pairs]
    return {name: {by: median(times) for by, times in taken[name].items()} for name in order}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("program", help="tide_generate")
    parser.add_argument("--sequences", default="1", metavar="N,N", help="prompts decoded together (1)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sequences.split(",")]
    found = measure(options.bundle, options.program, options.rounds, options.new_tokens, sizes)
    rows = []
    for case, by in found.items():
        figures = [by[PYTHON], by[CPP], by[PYTHON] - by[CPP], by[PYTHON] - by[INSIDE]]
        rows.append([case, *(f"{figure:.3f}" for figure in figures), f"{by[PYTHON] / by[CPP]:.2f}"])
    print("milliseconds per token, medians")
    print(table(["", PYTHON, CPP, "less", "Python outside ONNX Runtime", "Python over C++"], rows))
    if options.json is not None:
        write_json(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
