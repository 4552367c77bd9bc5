"""Everything that only a GPU can show, in one go: kernels, networks, plans, times, into one report folder.

    python tools/checks/gpu_session.py -o FOLDER [--carried FOLDER] [--bundle BUNDLE]... [--kernels LIBRARY]
        [--plugins LIBRARY] [--call 1|2] [--seconds N] [--resume] [--archive FILE.tgz] [--page FILE.md]
        [--only STEP]... [--list]

For a machine that is lent for a quarter of an hour and of which little is known. Every step is a process of its own
with a time limit, at most five minutes, and a log; what shows most comes first. One that fails, hangs or cannot be
started is recorded and the others go on, but for those that rest on it. What a step lacks (a GPU it runs on, a
compiler, a package) is its result. The report (FOLDER/report.json and report.md, the archive of both, logs and figures,
and the page of measurements) is written anew before and after every step, so that a session that is cut off leaves what
it has seen, and what it was doing. `--resume` goes on: what passed, failed or timed out stays, and a step in which the
session ended comes last, once. `--only` runs some steps again; the results of the others stay in the report.
Where minutes are lent, `--call 1` runs what counts in 420 seconds, and `--call 2` in 240 first what has not passed of
it, then what explains it. Without `--call` all steps are run.

Uses what is installed and downloads nothing: the extras `gpu`, `rtx` and `export` for all of it; TENSORRT_ROOT and
TENSORRT_RTX_ROOT for the C++ runtime. `--carried` names what `gpu_carry.py` has packed: bundles, and compiled kernels
and plugins. Without bundles the demo model is exported here, in three precisions. The package's library is compiled
where it was not brought along. Exit code 1 when a step failed.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gpu_machine import facts
from gpu_page import page
from gpu_steps import KERNELS, PLUGINS, ROOT, SECONDS, SHAPES, Given, Step, steps

PASSED, STARTED, CUT_OFF = "passed", "started", "cut off"
TAIL_LINES = 12
ALL_SKIPPED = re.compile(r"=*\s*\d+ skipped\b(?!.*passed).*")  # pytest's last line


@dataclass
class Result:
    """What became of a step: passed, failed (exit code 1), timed out, skipped: no GPU here.

    Attributes:
        starts: how often a session began it.
    """

    step: str
    shows: str
    outcome: str
    seconds: float
    tail: list[str]
    starts: int = 1


class Report:
    """The results so far, on disk after every change."""

    def __init__(self, folder: Path, archive: Path | None = None, document: Path | None = None) -> None:
        """Reads the report that is in `folder`, if there is one.

        Args:
            archive: .tgz to keep of the folder's reports, logs and figures.
            document: page to fill.
        """
        self._folder, self._archive, self._document = folder, archive, document
        report = folder / "report.json"
        entries = json.loads(report.read_text())["results"] if report.is_file() else []
        self.results = {entry["step"]: Result(**entry) for entry in entries}
        self._machine = facts()

    def write(self, todo: Sequence[Step]) -> None:
        """Replaces every file whole; results in the order of `todo`."""
        results = [self.results[step.name] for step in todo if step.name in self.results]
        rows = [f"| {r.step} | {r.outcome} | {r.seconds:g} | {r.shows} |" for r in results]
        ends = [f"## {r.step}: {r.outcome}\n\n```\n" + "\n".join(r.tail) + "\n```" for r in results if r.tail]
        head = ["# GPU session", "", "; ".join(f"{name}: {value}" for name, value in self._machine.items()), ""]
        table = "\n".join([*head, "| step | outcome | seconds | shows |", "| --- | --- | --- | --- |", *rows])
        entries = [asdict(result) for result in results]
        _replace(self._folder / "report.json", json.dumps({"machine": self._machine, "results": entries}, indent=2))
        _replace(self._folder / "report.md", "\n\n".join([table, *ends]))
        if self._document is not None:
            _replace(self._document, page(self._machine, entries, self._folder))
        if self._archive is not None:
            temporary = self._archive.with_name(f".{self._archive.name}")
            with tarfile.open(temporary, "w:gz") as archive:
                for file in sorted(self._folder.iterdir()):
                    if file.is_file() and not file.name.startswith("."):
                        archive.add(file, file.name)
            temporary.replace(self._archive)


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    temporary.replace(file)


def why_not(step: Step, before: Mapping[str, Result], seconds_left: float) -> str | None:
    """Why a step cannot be run, if so."""
    for name in step.after:
        if name not in before or before[name].outcome != PASSED:
            return f"{name} has not passed"
    missing = next((reason for lack in step.lacks if (reason := lack()) is not None), None)
    return missing if missing is not None or seconds_left > 0 else "no time left"


def run_step(step: Step, folder: Path, seconds_left: float) -> Result:
    """Runs a step; never raises for what it does."""
    started, log = time.perf_counter(), folder / f"{step.name}.log"
    limit = min(step.seconds, seconds_left)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages that were brought along stay
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), **dict(step.environment)}
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
            cut = limit < step.seconds
            outcome = f"{CUT_OFF} after {limit:.0f} s: no time left" if cut else f"timed out after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started too, also when we are interrupted
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if outcome == PASSED and step.spoiled_by is not None and any(step.spoiled_by in line for line in lines):
        outcome = f"failed ({step.spoiled_by})"
    if outcome == PASSED and lines and ALL_SKIPPED.fullmatch(lines[-1]):
        outcome = "skipped: by all of its tests"
    return Result(step.name, step.shows, outcome, round(time.perf_counter() - started, 1), lines[-TAIL_LINES:])


def of_call(call: int, todo: Sequence[Step], before: Mapping[str, Result]) -> list[Step]:
    """What a call has to do: what has not passed in those before it, and its own."""
    passed = {name for name, result in before.items() if result.outcome == PASSED}
    return [step for step in todo if step.call == call or (step.call < call and step.name not in passed)]


def to_resume(todo: Sequence[Step], before: Mapping[str, Result]) -> list[Step]:
    """What a session that goes on has to do. A step in which the last one ended, and what rests on it, comes last."""
    left, late = list[Step](), set[str]()
    for step in todo:
        outcome = before[step.name].outcome if step.name in before else ""
        if outcome == STARTED or late.intersection(step.after):
            late.add(step.name)
        if not outcome or outcome.startswith((STARTED, CUT_OFF, "skipped")):
            left.append(step)
    return [step for step in left if step.name not in late] + [step for step in left if step.name in late]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for reports, logs, bundles")
    parser.add_argument("--carried", type=Path, metavar="FOLDER", help="what gpu_carry.py has packed")
    parser.add_argument(
        "--bundle",
        action="append",
        type=Path,
        help="with segment networks; may be repeated, float32 first (those carried, or the demo model, exported here)",
    )
    parser.add_argument("--kernels", type=Path, metavar="LIBRARY", help=f"{KERNELS} (that carried, or compiled here)")
    parser.add_argument("--plugins", type=Path, metavar="LIBRARY", help=f"{PLUGINS} (likewise)")
    parser.add_argument("--call", type=int, choices=SECONDS, help="run the steps of one of two calls")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="for all steps of this run (420 and 240 of a call; else 3600)"
    )
    parser.add_argument("--resume", action="store_true", help="go on where the session in this folder ended")
    parser.add_argument("--archive", type=Path, metavar="FILE.tgz", help="rewritten with every step")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="page of measurements to write")
    parser.add_argument("--only", action="append", metavar="STEP", help="run these; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    return parser.parse_args(arguments)


def brought(options: argparse.Namespace) -> Given:
    """What the options and the carried folder hold."""
    bundles = list(options.bundle or ())
    if options.carried is not None and not bundles:
        bundles = sorted((options.carried / "bundles").glob("*"), key=lambda path: ("fp32" not in path.name, path.name))

    def one(given: Path | None, name: str) -> Path | None:
        carried = None if options.carried is None else options.carried / name
        found = given or (carried if carried is not None and carried.exists() else None)
        return found and found.resolve()

    libraries = one(options.kernels, KERNELS), one(options.plugins, PLUGINS)
    shapes = [] if options.carried is None else sorted((options.carried / SHAPES).glob("*"))
    by_name = [{path.name: path.resolve() for path in found} for found in (bundles, shapes)]
    return Given(by_name[0], *libraries, by_name[1])


def main(arguments: Sequence[str] | None = None) -> int:
    options, begun = parsed(arguments), time.perf_counter()
    folder = options.output.resolve()
    todo = steps(folder, brought(options))
    unknown = sorted(set(options.only or ()) - {step.name for step in todo})
    if unknown:
        sys.exit(f"gpu_session: no step {unknown[0]!r}: see --list")
    report = Report(folder, options.archive, options.page)
    results, everything = report.results, todo
    if options.call is not None:
        todo = of_call(options.call, todo, results)
    if options.list:
        for step in todo:
            print(f"{step.name:32} {' '.join(step.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    seconds = SECONDS.get(options.call, 3600) if options.seconds is None else options.seconds
    for step in to_resume(todo, results) if options.resume else todo:
        if options.only and step.name not in options.only:
            continue
        left = seconds - (time.perf_counter() - begun)
        starts = results[step.name].starts if step.name in results and options.resume else 0
        reason = why_not(step, results, left)
        if reason is None and starts > 1 and results[step.name].outcome == STARTED:
            results[step.name].outcome = "failed (the session ended in it, twice)"
        elif reason is not None:
            results[step.name] = Result(step.name, step.shows, f"skipped: {reason}", 0.0, [], starts)
        else:
            results[step.name] = Result(step.name, step.shows, STARTED, 0.0, [], starts + 1)
            report.write(everything)
            results[step.name] = replace(run_step(step, folder, left), starts=starts + 1)
        report.write(everything)
        print(f"{step.name:32} {results[step.name].outcome}", flush=True)
    bad = ("failed", "timed out")
    return int(any(result.outcome.startswith(bad) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
