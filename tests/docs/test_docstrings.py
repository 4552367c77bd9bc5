"""Docstrings open as those of onnx/ir-py and vLLM do: one short sentence that says what the thing is or does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

LONGEST = 100
RIDDLES = re.compile(r"(Of|As|See|What|Those|(The )?[Ss]ame|Its|Theirs?|It|They)\b")
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\bvs)\. (?=[A-Z`])")
FILES = sorted((ROOT / "tide_export").rglob("*.py"))


def first_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and the first line of each docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text.splitlines()[0]


def fault(line: str) -> str | None:
    """Returns what is wrong with the first line of a docstring, None if nothing is."""
    if not re.match(r"[A-Z`]", line):
        return "does not open with a capital letter"
    if not line.endswith("."):
        return "does not end with a period"
    if len(line) > LONGEST:
        return f"has {len(line)} characters"
    if SENTENCE_END.search(line):
        return "holds two sentences"
    if opening := RIDDLES.match(line):
        return f"opens with {opening[0]!r}"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tide_export")))
def test_docstrings_open_with_one_short_sentence(path: Path) -> None:
    assert [f"{number}: {why}: {line}" for number, line in first_lines(path) if (why := fault(line))] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Removes repeat_kv so that attention reads K/V before expansion.", None),
        ("Whether the value is an input of a graph.", None),
        ("`tide-export adapt`: trains a model for early exit.", None),
        ("lowercase.", "does not open with a capital letter"),
        ("No period", "does not end with a period"),
        ("Reads a file. Raises OSError.", "holds two sentences"),
        ("The same for int64.", "opens with 'The same'"),
        ("As of `Blocks`.", "opens with 'As'"),
        ("Reads " + "x" * LONGEST + ".", "has 107 characters"),
    ],
)
def test_the_faults(line: str, expected: str | None) -> None:
    assert fault(line) == expected
