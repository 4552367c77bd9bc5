"""Reads what readers of the site read: words that have one in the glossary, and first lines of docstrings.

    python tools/checks/prose.py

`make docs` runs it. It prints a line for each docstring that does not open with one short sentence which says what the
thing is or does, and for each home-made word in documents and docstrings; exit code 1 where there is one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 100  # characters of a first line
RIDDLES = re.compile(r"(Of|As|See|What|Those|(The )?[Ss]ame|Its|Theirs?|It|They)\b")
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\bvs)\. (?=[A-Z`])")
# A home-made word, as a regular expression, and the glossary's word. Only what can mean nothing else is here.
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
    r"top-1 (?:agreement|tokens?|predictions?)|disagreements?": "changed tokens",
    r"agreement with (?:full depth|the full model)|tokens to keep": "changed tokens",
    r"layer passes (?:per|a|of each) token|layers (?:a|each) token|passes per token|mean depth": "layers per token",
}
# In documents; code has `speedup` in the names of fields and variables.
IN_DOCUMENTS = {r"speed-?ups?|times full depth's speed": "speed over full depth"}


def main() -> int:
    faults = []
    for path in sorted((ROOT / "tide_export").rglob("*.py")):
        for number, text in docstrings(path):
            faults += [f"{path}:{number}: {fault}" for fault in (opening(text.splitlines()[0]), *words(text)) if fault]
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        faults += [f"{path}: {fault}" for fault in words(path.read_text(), INSTEAD | IN_DOCUMENTS)]
    print("\n".join(faults), end="\n" if faults else "")
    return bool(faults)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of each docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def opening(line: str) -> str | None:
    """Returns what is wrong with the first line of a docstring, None if nothing is."""
    if not re.match(r"[A-Z`]", line):
        return f"does not open with a capital letter: {line}"
    if not line.endswith("."):
        return f"does not end with a period: {line}"
    if len(line) > LONGEST:
        return f"has {len(line)} characters: {line}"
    if SENTENCE_END.search(line):
        return f"holds two sentences: {line}"
    return f"opens with a riddle: {line}" if RIDDLES.match(line) else None


def words(text: str, instead: dict[str, str] = INSTEAD) -> list[str]:
    """Returns the home-made words in a text, whatever breaks its lines, with the glossary's."""
    text = " ".join(text.split())
    found = [(re.findall(rf"\b(?:{home_made})\b", text, re.IGNORECASE), word) for home_made, word in instead.items()]
    return [f"{one!r}: the glossary says {word!r}" for home_made, word in found for one in home_made]


if __name__ == "__main__":
    raise SystemExit(main())
