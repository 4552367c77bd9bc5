"""A run fails if a test skips that known_skips.toml does not list: what runs nowhere is to be known.

A group's limits hold for a whole file or folder, so that any part of the tests may be run.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Group:
    """Skips for related reasons.

    Attributes:
        reasons: how they begin.
        tests: how many may skip, by file or folder; None is any number.
    """

    name: str
    runs_on: str
    reasons: tuple[str, ...]
    tests: dict[str, int | None]

    def place(self, test: str, reason: str) -> str | None:
        """The file or folder that lists a test (or a file that skips as a whole); None: none does."""
        file = test.partition("::")[0]
        holding = (place for place in self.tests if file == place or (place.endswith("/") and file.startswith(place)))
        return next(holding, None) if reason.startswith(self.reasons) else None


def groups() -> list[Group]:
    return [
        Group(
            name,
            group["runs_on"],
            tuple(group["reasons"]),
            {place: None if most == "any" else most for place, most in group["tests"].items()},
        )
        for name, group in tomllib.loads(LIST.read_text()).items()
    ]


def check(skipped: Iterable[tuple[str, str]], known: list[Group]) -> tuple[list[str], Counter[str]]:
    """Checks tests that skipped, each with its reason.

    Returns:
        a sentence for each that is not listed and for each limit that is exceeded, and the number of others by group.
    """
    wrong, counts = list[str](), Counter[tuple[str, str]]()
    for test, reason in skipped:
        placed = ((group.name, group.place(test, reason)) for group in known)
        where = next(((name, place) for name, place in placed if place is not None), None)
        if where is None:
            wrong.append(f"{test} skips, which {LIST.name} does not list: {reason}")
        else:
            counts[where] += 1
    limits = {(group.name, place): most for group in known for place, most in group.tests.items()}
    for (name, place), count in counts.items():
        most = limits[name, place]
        if most is not None and count > most:
            wrong.append(f"{count} tests of {place} skip, of which {LIST.name} lists {most} ([{name}])")
    return wrong, sum((Counter({name: count}) for (name, _), count in counts.items()), Counter[str]())


@dataclass(eq=False)  # pytest has plugins in sets
class KnownSkips:
    """A plugin for pytest that checks a run, in the process that sees all reports."""

    skipped: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.add(report)

    def add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        assert isinstance(report.longrepr, tuple | list)  # file, line, reason
        self.skipped.append((report.nodeid, str(report.longrepr[2]).removeprefix("Skipped: ")))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # of pytest-xdist, whose other process sees all
            return
        self.wrong, self.counts = check(self.skipped, groups())
        if self.wrong and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        if counts:
            terminalreporter.write_line(f"skipped, as {LIST.name} lists: {counts}")
        for sentence in self.wrong:
            terminalreporter.write_line(sentence, red=True)
