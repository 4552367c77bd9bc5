"""Documents and docstrings use the glossary's words, not home-made ones for the same things."""

import ast
import re
from pathlib import Path

import pytest
from documents import README, ROOT

GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text()
# A home-made word, as a regular expression, and the word to use. Only what can mean nothing else is here.
INSTEAD = {
    r"batch lanes?": "batch buffers",
    r"in turns": "interleaved",
    r"(?:most|least)_together|\w+_together": "max_batch_size, batched",
    r"(?:stands?|stood|standing) still": "frozen hidden state",
    r"looked[- ]up (?:drafts?|tokens?)|drafts? (?:by look-?up|(?:that (?:is|are|was|were) )?looked up)": "n-gram draft",
    r"(?:leave|leaves|leaving|left) away": "omit",
    r"forgiven?": "within tolerance",
    r"still_needing": "active",
    r"normed": "normalized",
    r"what waits": "pending tokens",
    r"by and by": "say when",
}
PATTERN = re.compile("|".join(rf"\b(?:{word})\b" for word in INSTEAD), re.IGNORECASE)


def docstrings(path: Path) -> str:
    """Those of a module, its classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def home_made(text: str) -> list[str]:
    """The home-made words in a text, whatever breaks its lines."""
    return PATTERN.findall(" ".join(text.split()))


def test_documents_use_the_words_of_the_glossary() -> None:
    found = {str(path): home_made(path.read_text()) for path in [README, *sorted(ROOT.glob("docs/**/*.md"))]}
    assert {path: words for path, words in found.items() if words} == {}


def test_docstrings_use_the_words_of_the_glossary() -> None:
    found = {str(path): home_made(docstrings(path)) for path in sorted((ROOT / "tide_export").rglob("*.py"))}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "text", ["Cases run in\nturns.", "max most_together", "a draft looked up", "A state stands still.", "Left away."]
)
def test_home_made_words_are_found(text: str) -> None:
    assert len(home_made(text)) == 1


def test_the_glossary_is_short_and_says_one_thing_of_each_word() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", GLOSSARY, re.MULTILINE)[2:]
    assert 12 <= len(rows) <= 16
    assert [word for word, meaning in rows if not re.fullmatch(r"[^.]*(?:\.\w[^.]*)*\.", meaning)] == []
