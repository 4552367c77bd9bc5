"""Prints how much of each folder the tests ran, by lines and branches of Python and C++: `make coverage`.

    python tools/checks/coverage_table.py CHECKOUT [--write PAGE]

Reads CHECKOUT/coverage.json, of coverage.py, and what gcov says of the object files in CHECKOUT/build, and of the
tests' operators in its test store, that were compiled with --coverage. A line of C++ counts once, and so do the two
ways of each condition in it, however often templates, inlining and instruction sets repeat it; branches of other lines
are of exceptions and destructors.
"""

import argparse
import datetime
import functools
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

CONDITION = re.compile(r"\b(?:if|for|while)\b|\?|(?<= )(?:&&|\|\|)")
BEGIN, END = "<!-- coverage -->\n", "<!-- /coverage -->\n"


@dataclass
class Counts:
    lines: int = 0
    covered_lines: int = 0
    branches: int = 0
    covered_branches: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def cells(self) -> list[str]:
        shares = [(self.covered_lines, self.lines), (self.covered_branches, self.branches)]
        return [text for share in shares for text in (f"{share[1]:,}", f"{100 * share[0] / max(share[1], 1):.1f} %")]


def python_counts(report: dict[str, Any]) -> dict[str, Counts]:
    """Returns those of each file in a report of coverage.py."""
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {name: Counts(*(file["summary"][key] for key in names)) for name, file in report["files"].items()}


def cpp_counts(checkout: Path) -> dict[str, Counts]:
    """Returns those of each file under cpp/, by gcov."""
    lines = defaultdict[str, Counter[int]](Counter)  # by file: how often each ran
    branches = defaultdict[str, Counter[tuple[int, int]]](Counter)  # by file: of a line
    for name, line in _gcov_lines(checkout):
        lines[name][line["line_number"]] += line["count"]
        source = _source(checkout / name)[line["line_number"] - 1].split("//")[0]
        found = [branch["count"] for branch in line["branches"] if not branch["throw"]]
        ways = len(found) if "switch (" in source else 2 * len(CONDITION.findall(source))
        for number, count in enumerate(found if ways else ()):
            branches[name][line["line_number"], number % ways] += count
    return {
        name: Counts(len(counts), _positive(counts), len(branches[name]), _positive(branches[name]))
        for name, counts in lines.items()
    }


@functools.cache
def _source(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _positive(counts: Counter[Any]) -> int:
    return sum(count > 0 for count in counts.values())


def _gcov_lines(checkout: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields files below `checkout` and lines in them, a line once for each function that has it."""
    store = checkout / "out" / "test-store" / "native"
    for notes in sorted([*(checkout / "build").rglob("*.gcno"), *store.glob("*/operators/**/*.gcno")]):
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(notes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for document in map(json.loads, done.stdout.splitlines()):
            for file in document["files"]:
                path = Path(document["current_working_directory"], file["file"])
                if path.is_relative_to(checkout / "cpp"):
                    for line in file["lines"]:
                        yield str(path.relative_to(checkout)), line


def table(files: dict[str, Counts]) -> str:
    """Returns a table in Markdown: a row per folder (of two names, three below cpp/src), and one per language."""
    rows = defaultdict[str, Counts](Counts)
    for name, counts in files.items():
        parts = Path(name).parent.parts
        folder, language = "/".join(parts[: 3 if parts[:2] == ("cpp", "src") else 2]), f"all {parts[0]}"
        rows[folder] += counts
        rows[language] += counts
    cells = [
        ["Folder", "Lines", "covered", "Branches", "covered"],
        *([row, *rows[row].cells()] for row in sorted(rows)),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "".join(
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |\n" for row in cells
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--write", type=Path, metavar="PAGE", help=f"put it between {BEGIN.strip()} and {END.strip()}")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    cpp = cpp_counts(checkout)
    if not cpp:
        print(f"error: {checkout / 'build'} has nothing that GCC compiled with --coverage", file=sys.stderr)
        return 2
    text = table(python_counts(json.loads((checkout / "coverage.json").read_text())) | cpp)
    print(text, end="")
    if options.write:
        page = options.write.read_text()
        before, rest = page.split(BEGIN)
        caption = f"What the tests of `make test` run: `make coverage`, {datetime.date.today()}.\n\n"
        options.write.write_text(f"{before}{BEGIN}{caption}{text}{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
