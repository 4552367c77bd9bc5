"""The programs that tools run in processes of their own, written as strings, import what exists."""

import ast
import re
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
IMPORT = re.compile(r"^\s*(?:from|import) .*\b(?:tide_export|decode|harness)\b.*$", re.MULTILINE)


def imports(script: Path) -> list[str]:
    """The import statements inside the script's strings."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [line.strip() for text in strings for line in IMPORT.findall(text) if is_statement(line.strip())]


def is_statement(line: str) -> bool:
    try:
        return isinstance(ast.parse(line).body[0], ast.Import | ast.ImportFrom)
    except SyntaxError:
        return False


SCRIPTS = [path for path in sorted(TOOLS.rglob("*.py")) if imports(path)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_child_programs_import_what_exists(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    for line in imports(script):
        exec(line, {})
