"""The page of errors quotes the messages of the code."""

import ast
import re

import pytest
from documents import ROOT

PAGE = (ROOT / "docs" / "guide" / "errors.md").read_text()
ROWS = re.findall(r"^- `.*(?:\n  .*)*", PAGE, re.MULTILINE)  # a message or several, a colon, what to do


def messages(row: str) -> list[str]:
    """Returns the messages of a row; none if it does not name what to do."""
    quoted = re.match(r"- ((?:`[^`]+`, )*`[^`]+`): \S", re.sub(r"\n +", " ", row))
    return re.findall(r"`([^`]+)`", quoted[1]) if quoted else []


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every string in the sources of the package and of the runtime; NUL stands for a value that is filled in."""
    found = []
    for path in [*(ROOT / "tide_export").rglob("*.py"), ROOT / "packaging" / "tide_build.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        getattr(part, "value", "") if isinstance(part, ast.Constant) else "\0" for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*[sdrf]", "\0", node.value))
    for path in (ROOT / "cpp" / "src").rglob("*"):
        if path.suffix in (".cpp", ".h"):
            found += cpp_texts(path.read_text())
    return found


def cpp_texts(source: str) -> list[str]:
    """The strings of a source in C++; those of one expression are one, with NUL around them for what is filled in."""
    found, end = [""], 0
    for literal in re.finditer(r'"((?:[^"\\\n]|\\.)*)"', source):
        between, end = source[end : literal.start()], literal.end()
        if re.search("[;{}]", between):
            found.append("")
        if between.strip():
            found[-1] += "\0"
        found[-1] += re.sub(r"\\(.)", r"\1", literal[1])
    return [text + "\0" for text in found]


def test_every_message_of_the_page_is_one_of_the_code(texts: list[str]) -> None:
    """Quote it as the code has it, with `...`, `N` or `M` for what is filled in."""
    unknown = []
    for message in (message for row in ROWS for message in messages(row)):
        pattern = re.compile(".+?".join(map(re.escape, re.split(r"\.\.\.|\b[NM]\b", message))), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            unknown.append(message)
    assert unknown == []


def test_every_row_names_messages_and_what_to_do() -> None:
    assert len(ROWS) == PAGE.count("\n- `") > 0
    assert [row for row in ROWS if not messages(row)] == []
