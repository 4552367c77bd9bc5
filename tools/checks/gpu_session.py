"""Everything that only a GPU can show, in one go: kernels, engines, comparisons and times, into one report folder.

    python tools/checks/gpu_session.py -o FOLDER [--bundle BUNDLE] [--tide FOLDER] [--seconds N] [--only STEP]...
    [--list]

For a machine that is lent for an hour and of which little is known. Every step is a process of its own with a time
limit and a log; one that fails, hangs or cannot be started is recorded and the others go on, but for those that rest on
it. FOLDER/report.json and FOLDER/report.md are written anew after every step, so that a session that is cut off leaves
what it has seen. What a step lacks (a GPU, a compiler, a package) is its result. `--only` runs some steps again; the
results of the others stay in the report.

Uses what is installed and downloads nothing: the extras `gpu`, `rtx` and `export` for all of it; TENSORRT_ROOT for the
plugin library and, like TENSORRT_RTX_ROOT, for the C++ runtime, which also needs the headers of ONNX Runtime and
nlohmann/json (in ONNXRUNTIME_INCLUDE_DIR and NLOHMANN_JSON_INCLUDE_DIR where they are not installed). `--bundle` names
a bundle with segment networks exported elsewhere, in place of exporting the demo model here. Exit code 1 when a step
failed.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_steps import ROOT, Step, steps

PASSED = "passed"
TAIL_LINES = 12
ALL_SKIPPED = re.compile(r"=*\s*\d+ skipped\b(?!.*passed).*")  # pytest's last line


@dataclass
class Result:
    """What became of a step: passed, failed (exit code 1), timed out, skipped: no GPU here."""

    step: str
    shows: str
    outcome: str
    seconds: float
    tail: list[str]


def run_step(step: Step, folder: Path, before: dict[str, Result], seconds_left: float) -> Result:
    """Runs a step, unless it cannot be; never raises for what the step does."""

    def skipped(reason: str) -> Result:
        return Result(step.name, step.shows, f"skipped: {reason}", 0.0, [])

    for name in step.after:
        if name not in before or before[name].outcome != PASSED:
            return skipped(f"{name} has not passed")
    missing = next((reason for lack in step.lacks if (reason := lack()) is not None), None)
    if missing is not None:
        return skipped(missing)
    if seconds_left <= 0:
        return skipped("no time left")
    started, log = time.perf_counter(), folder / f"{step.name}.log"
    limit = min(step.seconds, seconds_left)
    environment = os.environ | {"PYTHONPATH": str(ROOT), **dict(step.environment)}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except OSError as error:
            return Result(step.name, step.shows, f"failed (cannot be started: {error.strerror})", 0.0, [])
        try:
            code = process.wait(timeout=limit)
            outcome = PASSED if code == 0 else f"failed (exit code {code})"
        except subprocess.TimeoutExpired:
            outcome = f"timed out after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started too, also when we are interrupted
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if outcome == PASSED and lines and ALL_SKIPPED.fullmatch(lines[-1]):
        outcome = "skipped: by all of its tests"
    return Result(step.name, step.shows, outcome, round(time.perf_counter() - started, 1), lines[-TAIL_LINES:])


def write_report(folder: Path, results: Sequence[Result]) -> None:
    """FOLDER/report.json and FOLDER/report.md; each is replaced whole."""
    rows = [f"| {r.step} | {r.outcome} | {r.seconds:g} | {r.shows} |" for r in results]
    ends = [f"## {r.step}: {r.outcome}\n\n```\n" + "\n".join(r.tail) + "\n```" for r in results if r.tail]
    page = "\n".join(["# GPU session", "", "| step | outcome | seconds | shows |", "| --- | --- | --- | --- |", *rows])
    texts = {"report.json": json.dumps([asdict(r) for r in results], indent=2), "report.md": "\n\n".join([page, *ends])}
    for name, text in texts.items():
        temporary = folder / f".{name}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(folder / name)


def earlier(folder: Path) -> dict[str, Result]:
    """The results in a report that is there already."""
    report = folder / "report.json"
    return {entry["step"]: Result(**entry) for entry in json.loads(report.read_text())} if report.is_file() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for reports, logs, bundles")
    parser.add_argument("--bundle", type=Path, help="with segment networks (the demo model, exported here)")
    parser.add_argument(
        "--tide", type=Path, metavar="FOLDER", help="TIDE's source distribution, for its kernels' times"
    )
    parser.add_argument("--seconds", type=float, default=3600, metavar="N", help="for all steps together (3600)")
    parser.add_argument("--only", action="append", metavar="STEP", help="run these; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    options = parser.parse_args(arguments)
    folder = options.output.resolve()
    todo = steps(folder, options.bundle and options.bundle.resolve(), options.tide and options.tide.resolve())
    unknown = sorted(set(options.only or ()) - {step.name for step in todo})
    if unknown:
        parser.error(f"no step {unknown[0]!r}: see --list")
    if options.list:
        for step in todo:
            print(f"{step.name:32} {' '.join(step.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    results, started = earlier(folder), time.perf_counter()
    for step in todo:
        if options.only and step.name not in options.only:
            continue
        results[step.name] = run_step(step, folder, results, options.seconds - (time.perf_counter() - started))
        write_report(folder, [results[other.name] for other in todo if other.name in results])
        print(f"{step.name:32} {results[step.name].outcome}", flush=True)
    bad = ("failed", "timed out")
    return int(any(result.outcome.startswith(bad) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
