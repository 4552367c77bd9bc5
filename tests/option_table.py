"""Reads the table of the options of a generation, cpp/include/tide/options.inc."""

import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "cpp" / "include" / "tide" / "options.inc"
ROW = re.compile(
    r'^TIDE_OPTION\(([^,]+), (\w+), ([^,]+), (\w+(?:\([^)]*\))?), (\w+),\s+((?:"[^"]*"\s*)+)\)$', re.MULTILINE
)


class Row(NamedTuple):
    """One option; all columns are C++, the help's strings are joined."""

    type: str
    default: str
    limits: str
    counts: str
    help: str


def option_rows() -> dict[str, Row]:
    """The options by name."""
    text = TABLE.read_text()
    found = ROW.findall(text)
    assert len(found) == text.count("\nTIDE_OPTION("), "a row cannot be read"
    return {
        name: Row(kind, default, limits, counts, "".join(re.findall(r'"([^"]*)"', help_)))
        for kind, name, default, limits, counts, help_ in found
    }
