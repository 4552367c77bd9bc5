"""MkDocs hook: fills the markers in pages with what the code itself declares.

`<!-- commands -->` becomes a section per command of `tide-export`, from its argument parser; `<!-- floors -->` becomes
the table of the package's floors, from tools/checks/structure.py and the docstring of each folder.
"""

import argparse
import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "checks"))

import structure

from tide_export.cli.options import build_parser

ROOT = Path(__file__).parents[1]
COMMANDS, FLOORS = "<!-- commands -->", "<!-- floors -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replaces the markers in a page."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands(build_parser()))
    if FLOORS in markdown:
        markdown = markdown.replace(FLOORS, floors())
    return markdown


def commands(parser: argparse.ArgumentParser) -> str:
    """All subcommands of `parser` as Markdown, a section each."""
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return "\n\n".join(_section(command) for command in subparsers.choices.values())


def floors() -> str:
    """The table of floors, top to bottom: why each is there, and the first sentence of each folder's docstring."""
    rows = []
    for number, (why, units) in reversed(list(enumerate(structure.FLOORS.items(), 1))):
        rows.append(f"| {number} | | {why} |")
        folders = [unit for unit in units if unit != structure.PACKAGE]
        rows += [f"| | `{unit}` | {_sentence(ROOT / structure.PACKAGE / unit)} |" for unit in folders]
    return "\n".join(["| floor | folder or module | what it does |", "| --- | --- | --- |", *rows])


def _sentence(unit: Path) -> str:
    source = unit / "__init__.py" if unit.is_dir() else unit.with_suffix(".py")
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0].replace("\n", " ")


def _section(parser: argparse.ArgumentParser) -> str:
    shown = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    required = [_name(action, 1) for action in sorted(shown, key=lambda a: bool(a.option_strings)) if action.required]
    blocks = [f"## {parser.prog}", f"`{' '.join([parser.prog, *required, '[options]'])}`", parser.description or ""]
    for group in parser._action_groups:
        rows = [f"| `{_name(action)}` | {_cell(action)} |" for action in group._group_actions if action in shown]
        if rows:
            blocks.append("\n".join([f"| {group.title} | |", "| --- | --- |", *rows]))
    return "\n\n".join([*blocks, parser.epilog or ""])


def _name(action: argparse.Action, spellings: int | None = None) -> str:
    """How the option is written, with its value."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return f"{', '.join(action.option_strings[:spellings])} {value}".strip().replace("|", "\\|")


def _cell(action: argparse.Action) -> str:
    return (action.help or "").replace("|", "\\|")
