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

from tide_export.cli.commands import GROUPS
from tide_export.cli.options import SPEC_HELP, build_parser
from tide_export.cli.parser import Parser

ROOT = Path(__file__).parents[1]
COMMANDS, FLOORS = "<!-- commands -->", "<!-- floors -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replaces the markers in a page."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands(build_parser()))
    if FLOORS in markdown:
        markdown = markdown.replace(FLOORS, floors())
    return markdown


def commands(parser: Parser) -> str:
    """All subcommands of `parser` as Markdown, a section each."""
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    sections = []
    for group, names in GROUPS.items():
        sections += [f"## {group[0].upper()}{group[1:]}", *(_section(subparsers.choices[name]) for name in names)]
    return "\n\n".join([*sections, SPEC_HELP])


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


def _section(parser: Parser) -> str:
    about, basic = parser.about, parser.about.basic
    shown = [action for action in parser._actions if action.dest not in ("help", "help_all")]
    blocks = [
        f"### {parser.prog}",
        about.summary,
        "\n".join(["```", *(f"tide-export {one}" for one in about.examples), "```"]),
    ]
    first = [action for action in shown if basic is None or not action.option_strings or action.dest in basic]
    tables = {"options" if basic is None else "basic options": first}
    for group in parser._action_groups:
        tables[f"{group.title}, with `--help-all`"] = [a for a in group._group_actions if a in shown and a not in first]
    blocks += [_table(title, actions) for title, actions in tables.items()]
    return "\n\n".join(filter(None, blocks))


def _table(title: str, actions: list[argparse.Action]) -> str:
    rows = [f"| `{_name(action)}` | {_cell(action)} |" for action in actions if action.help != argparse.SUPPRESS]
    return "\n".join([f"| {title} | |", "| --- | --- |", *rows]) if rows else ""


def _name(action: argparse.Action) -> str:
    """How the option is written, with its value."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return f"{', '.join(action.option_strings)} {value}".strip().replace("|", "\\|")


def _cell(action: argparse.Action) -> str:
    return (action.help or "").replace("|", "\\|")
