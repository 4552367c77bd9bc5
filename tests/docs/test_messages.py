"""The page of messages quotes the messages of the code."""

import ast
import re

import pytest
from documents import ROOT

PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text()
MESSAGES = [
    m for line in PAGE.splitlines() if line.startswith("| `") for m in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every string in the package's sources; NUL stands for a value that is filled in."""
    found = []
    for path in (ROOT / "tide_export").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        getattr(part, "value", "") if isinstance(part, ast.Constant) else "\0" for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*[sdrf]", "\0", node.value))
    return found


def test_every_message_of_the_page_is_one_of_the_code(texts: list[str]) -> None:
    """Quote it as the code has it, with `...`, `N` or `M` for what is filled in."""
    unknown = []
    for message in MESSAGES:
        pattern = re.compile(".+?".join(map(re.escape, re.split(r"\.\.\.|\b[NM]\b", message))), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            unknown.append(message)
    assert unknown == []
