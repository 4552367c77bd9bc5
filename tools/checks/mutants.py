"""Tests the tests: changes the runtime's decisions one expression at a time, and lists the changes no test notices.

    python tools/checks/mutants.py [PATTERN]... [--every N] [--jobs N] [--seconds N] [--tests ARGUMENT...]

mutmut makes the mutants, of the modules and for the tests under [tool.mutmut] in pyproject.toml, into `mutants/`. One
pass without a mutant times the tests and records which functions each of them reaches. Then every mutant runs in a fork
of this process, which has imported everything and holds the session's fixtures: the tests that reach its function,
fastest first, up to the first failure. `mutmut run` gives the same verdicts in about ten times as long.

Prints one row per module and the difference of every survivor. Set TIDE_TEST_BUNDLES, so that bundles are made once.
"""

import argparse
import contextlib
import fnmatch
import io
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutmut import __main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, setup_source_paths, walk_mutatable_files
from mutmut.utils.format_utils import get_module_from_key, mangled_name_from_mutant_name

VERDICTS = ("killed", "timed out", "survived", "not reached")


class Forks:
    """The pytest plugin: instead of running the tests once, runs them for each mutant.

    Attributes:
        verdicts: by mutant.
    """

    def __init__(self, mutants: list[str], jobs: int, seconds: float) -> None:
        self._mutants, self._jobs, self._seconds = mutants, jobs, seconds
        self._running = dict[int, str]()
        self.verdicts = dict[str, str]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        reached = self._clean_pass(session)
        for mutant in self._mutants:
            tests = self._affordable(reached[mangled_name_from_mutant_name(mutant)])
            if not tests:
                self.verdicts[mutant] = "not reached"
                continue
            while len(self._running) >= self._jobs:
                self._wait()
            pid = os.fork()
            if pid == 0:
                _run_mutant(mutant, session, tests, limit=20 + 5 * sum(taken for taken, _ in tests))
            self._running[pid] = mutant
        while self._running:
            self._wait()
        return True

    def _clean_pass(self, session: pytest.Session) -> dict[str, list[tuple[float, pytest.Item]]]:
        """Runs all tests without a mutant: seconds and tests by the mangled name of a function that they reach."""
        reached = defaultdict[str, list[tuple[float, pytest.Item]]](list)
        set_mutant_under_test("stats")
        for item in session.items:
            state()._stats.clear()
            started = time.perf_counter()
            if not _passes(item, session):
                pytest.exit(f"{item.nodeid} fails without a mutant", returncode=1)
            taken = time.perf_counter() - started
            for function in state()._stats:
                reached[function].append((taken, item))
        set_mutant_under_test("")
        print(f"{len(session.items)} tests reach {len(reached)} functions", flush=True)
        return reached

    def _affordable(self, tests: Iterable[tuple[float, pytest.Item]]) -> list[tuple[float, pytest.Item]]:
        """The fastest of them, as many as take no longer than a mutant may, at least one."""
        chosen, total = list[tuple[float, pytest.Item]](), 0.0
        for taken, item in sorted(tests, key=lambda test: test[0]):
            total += taken
            if chosen and total > self._seconds:
                break
            chosen.append((taken, item))
        return chosen

    def _wait(self) -> None:
        pid, status = os.wait()
        mutant, code = self._running.pop(pid), os.waitstatus_to_exitcode(status)
        self.verdicts[mutant] = {0: "survived", -signal.SIGALRM: "timed out"}.get(code, "killed")
        if self.verdicts[mutant] != "killed":
            print(f"{len(self.verdicts)}/{len(self._mutants)} {mutant}: {self.verdicts[mutant]}", flush=True)


def _passes(item: pytest.Item, session: pytest.Session) -> bool:
    """Runs one test; afterwards the fixtures of the session alone are left."""
    following: Any = session  # in place of an item: fixtures are torn down to what it needs
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))


def _run_mutant(mutant: str, session: pytest.Session, tests: list[tuple[float, pytest.Item]], limit: float) -> None:
    """Ends this process: with 0 where all tests pass, by SIGALRM after `limit` seconds."""
    signal.alarm(int(limit))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    set_mutant_under_test(mutant)
    try:
        survived = all(_passes(item, session) for _, item in tests)
    except BaseException:
        survived = False
    os._exit(not survived)


def generated(patterns: list[str], every: int) -> list[str]:
    """Names of the mutants that match one of the patterns; makes all that are missing."""
    Path("mutants").mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):  # the names of all files
        copy_src_dir()
        copy_also_copy_files()
        setup_source_paths()
        mutmut.create_mutants(1)
    chosen = []
    for path in sorted(walk_mutatable_files()):
        data = SourceFileMutationData(path=path)
        data.load()
        names = [name for name in data.exit_code_by_key if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        chosen += names[::every]
    return chosen


def difference(mutant: str) -> str:
    """The lines that it changes."""
    path = Path(*get_module_from_key(mutant).split(".")).with_suffix(".py")
    lines = get_diff_for_mutant(mutant, path=path).splitlines()
    return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="of mutants' names (all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one mutant in N of each module")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (1)")
    parser.add_argument("--seconds", type=float, default=60, metavar="N", help="of tests for each mutant (60)")
    parser.add_argument(
        "--tests",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="the rest is for pytest, instead of the tests in pyproject.toml",
    )
    options = parser.parse_args()
    root, mutants = Path.cwd(), generated(options.patterns, options.every)
    forks = Forks(mutants, options.jobs, options.seconds)
    os.chdir("mutants")
    arguments = ["-q", "-s", "-p", "no:faulthandler", *config().pytest_add_cli_args]
    code = pytest.main(arguments + (options.tests or config().pytest_add_cli_args_test_selection), plugins=[forks])
    os.chdir(root)
    rows = defaultdict[str, Counter[str]](Counter)
    for mutant, verdict in forks.verdicts.items():
        rows[get_module_from_key(mutant)][verdict] += 1
    print("| module | mutants |", " | ".join(VERDICTS), "|")
    for module, counts in rows.items():
        print(f"| {module} | {counts.total()} |", " | ".join(str(counts[verdict]) for verdict in VERDICTS), "|")
    for mutant, verdict in forks.verdicts.items():
        if verdict in ("survived", "not reached"):
            print(f"\n{mutant}: {verdict}\n{difference(mutant)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
