"""What a token costs in the Python loop and in the C++ loop, on one bundle, in turns.

    python tools/benchmark_cpp.py BUNDLE PROGRAM [--rounds 9] [--new-tokens 96] [--json FILE]

PROGRAM is `tide_generate` of `cmake --preset runtime` (docs/cpp.md). Each round decodes the same tokens with both, one
thread, at full depth and with exits, in random order; both drive the same graph in the same library. Of Python's time,
what passes outside its one call to ONNX Runtime is shown too. The tokens of both must be equal, or there is nothing to
compare.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarking.turns import write_json

from tide_export.runtime.engine import Engine, load
from tide_export.tables import table

CASES: dict[str, dict[str, Any]] = {"full": {"mode": "full"}, "exit at 0.5": {"mode": "exit", "threshold": 0.5}}
PYTHON, CPP, INSIDE = "Python", "C++", "inside ONNX Runtime"


class Timed:
    """A session that adds up the time its runs take."""

    def __init__(self, session: Any) -> None:
        self._session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        started = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - started


def python_turn(engine: Engine, session: Timed, prompt: list[int], count: int, case: str) -> tuple[list[int], dict]:
    """The tokens, and milliseconds per token behind the first, with those inside ONNX Runtime."""
    stream = engine.stream(prompt, count, stop_token_ids=[], **CASES[case])
    tokens = [next(stream)]
    session.seconds = 0.0
    tokens += stream
    per_token = 1000 / (count - 1)
    return tokens, {PYTHON: stream.stats.decode_seconds * per_token, INSIDE: session.seconds * per_token}


def cpp_turn(program: str, bundle: str, prompt: list[int], count: int, case: str) -> tuple[list[int], dict]:
    options = [word for name, value in CASES[case].items() for word in (f"--{name}", str(value))]
    line = [program, bundle, "--ids", ",".join(map(str, prompt)), "--max-new-tokens", str(count), *options]
    line += ["--ignore-eos", "--threads", "1", "--no-verify"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"'{program}' ended with {done.returncode}")
    made = json.loads(done.stdout)
    return made["tokens"], {CPP: made["stats"]["decode_seconds"] * 1000 / (count - 1)}


def measure(bundle: str, program: str, rounds: int, count: int) -> dict[str, dict[str, float]]:
    """By case: median milliseconds per token of each loop, and inside ONNX Runtime."""
    loaded = load(bundle, "cpu", threads=1, verify=False)
    session = Timed(loaded._session)
    engine = Engine(loaded.bundle, session)
    prompt = [(i * 7919) % engine.manifest.model.vocab_size for i in range(1, 65)]
    taken: dict[str, dict[str, list[float]]] = {case: {PYTHON: [], INSIDE: [], CPP: []} for case in CASES}
    for _ in range(rounds):
        for case in random.sample(list(CASES), len(CASES)):
            turns = [
                lambda case=case: python_turn(engine, session, prompt, count, case),
                lambda case=case: cpp_turn(program, bundle, prompt, count, case),
            ]
            made = [turn() for turn in random.sample(turns, 2)]
            if made[0][0] != made[1][0]:
                raise SystemExit(f"the two runtimes disagree about the tokens of '{case}'")
            for _, times in made:
                for name, milliseconds in times.items():
                    taken[case][name].append(milliseconds)
    return {case: {name: median(times) for name, times in by.items()} for case, by in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("program", help="tide_generate")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = measure(options.bundle, options.program, options.rounds, options.new_tokens)
    rows = []
    for case, by in found.items():
        figures = [by[PYTHON], by[CPP], by[PYTHON] - by[CPP], by[PYTHON] - by[INSIDE]]
        rows.append([case, *(f"{figure:.3f}" for figure in figures)])
    print("milliseconds per token, medians")
    print(table(["", PYTHON, CPP, "less", "Python outside ONNX Runtime"], rows))
    if options.json is not None:
        write_json(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
