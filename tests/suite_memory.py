"""Bounds what a worker of the suite holds: a plugin that frees memory after each file, and reports where it grows.

Tests may leave cycles of torch models, graphs and sessions, which `conftest` lets Python's collector look for seldom.
After each file they are collected, and freed memory goes back to the system. A run fails in which a process ever held
more than `LIMIT`.
"""

import gc
import os
import resource
from pathlib import Path

import pytest

from tide_export.common.memory import return_free_memory

MIB = 1 << 20
LIMIT = 4096  # MiB
GROWTH = 100  # MiB more than after any file before: reported
PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory:
    """What one process held after each file that made it grow."""

    def __init__(self) -> None:
        self.largest = 0
        self.grown: list[tuple[str, int]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is not None and nextitem.path == item.path:
            return
        return_free_memory()
        gc.freeze()  # what is left stays: each collection, and a loaded model makes one, took 0.25 s to see it
        held = held_now()
        if held > self.largest + GROWTH:
            self.grown.append((str(item.path.relative_to(item.config.rootpath)), held))
            self.largest = held

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["memory"] = self.found()

    def found(self) -> tuple[int, list[tuple[str, int]]]:
        """Returns the most that this process ever held, in MiB, and the files after which it held more than before."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, self.grown


class Report:
    """What all processes held, at the end of the run."""

    def __init__(self, own: Memory | None) -> None:
        self.own = own
        self.found: dict[str, tuple[int, list[tuple[str, int]]]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        if "memory" in getattr(node, "workeroutput", {}):
            self.found[node.gateway.id] = node.workeroutput["memory"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.own is not None:
            self.found["this process"] = self.own.found()
        if session.exitstatus == pytest.ExitCode.OK and any(most > LIMIT for most, _ in self.found.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, (most, grown) in sorted(self.found.items()):
            files = ", ".join(f"{held} after {file}" for file, held in grown)
            verdict = f": more than the {LIMIT} that a test run may hold" if most > LIMIT else ""
            terminalreporter.write_line(f"memory of {name}: at most {most} MiB{verdict} ({files})")


def held_now() -> int:
    """Returns the resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE // MIB


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = not config.getoption("numprocesses", None)
    memory = Memory() if runs_tests else None
    if memory is not None:
        config.pluginmanager.register(memory)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(memory))
