"""The documents, their code blocks and the commands in them."""

import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = sorted(ROOT.glob("docs/guide/*.md"))
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob(".github/**/*.md")}
)


def name(path: Path) -> str:
    """A document's path, for the names of tests."""
    return str(path.relative_to(ROOT))


def blocks_of(text: str) -> list[str]:
    """The contents of all code blocks."""
    return re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(document: Path, language: str) -> list[str]:
    """The contents of the code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def commands(document: Path) -> list[list[str]]:
    """The words of each command in the bash blocks."""
    lines = [line for block in blocks(document, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def script_commands(script: Path) -> list[list[str]]:
    """The words of each command of this project in a shell script."""
    lines = script.read_text().replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("tide-export", "python "))]


def script_folder(folder: Path, export_options: str = "") -> dict[str, str]:
    """An environment in which `python` is this interpreter and `tide-export` this checkout's, `export` with options."""
    script = folder / "bin" / "tide-export"
    script.parent.mkdir()
    more = f'test "$1" = export && set -- "$@" {export_options}'
    script.write_text(f'#!/bin/sh\n{more}\nexec "{sys.executable}" -m tide_export.cli.main "$@"\n')
    script.chmod(0o755)
    python = script.with_name("python")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{script.parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
