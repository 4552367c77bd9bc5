"""Writes the pages that say what the code itself declares; tests/docs/test_generated.py keeps them equal to it.

    python docs/generated.py

docs/reference/cli.md is made from the argument parser, docs/reference/api.md from signatures and docstrings, and the
table of floors in docs/architecture/index.md from tools/checks/structure.py and the docstring of each folder.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "checks"))

import structure

from tide_export.cli.commands import GROUPS
from tide_export.cli.options import SPEC_HELP, build_parser
from tide_export.cli.parser import Parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- floors -->\n", "<!-- /floors -->\n"
NOTICE = "<!-- Written by `python docs/generated.py`: edit what it is made from. -->"
QUIET = {"warn_unknown_params": False, "warn_missing_types": False}  # one entry may name several
LONGEST = 100  # characters of a signature on one line

CLI = f"""# Command line

{NOTICE}

`tide-export COMMAND --help` prints the basic options, `--help-all` all. A default stands in parentheses. Exit codes:
0 done, 1 `validate` found a difference, 2 a user's mistake ([one sentence on stderr](../guide/errors.md)), 130
interrupted.
"""
API = f"""# Python API

{NOTICE}

What runs a bundle needs NumPy, the runtime's library and one engine; what makes one needs the `export` extra. Both are
imported when they are first used. [A first program](../guide/python.md). The fields of `TideConfig`, `AdaptConfig` and
`DraftConfig` are in [settings](settings.md), those of `GenerationConfig` in [decoding options](decoding.md) too.
"""
# The public names by task, from `tide_export` or with their path in it, each with the members of the class that are
# shown; *: its functions and properties.
NAMES = {
    "Run a bundle": {
        "load": "",
        "Engine": "generate stream embed scheduler start start_batch resolved manifest tokenizer",
        "GenerationConfig": "",
        "Generation": "",
        "runtime.generation.TokenLogprobs": "",
        "runtime.stats.ExitStats": "*",
        "runtime.embedding.EmbeddingConfig": "options vector",
        "runtime.stepping.sample": "",
    },
    "Text": {
        "runtime.tokenizer.BundleTokenizer": "encode encode_plain decode stream",
        "runtime.tokenizer.TextStream": "push finish",
        "runtime.chat_template.ChatTemplate": "encode render",
    },
    "Requests that come and go": {
        "Scheduler": "submit step start close closed waiting running prefix_cache_bytes",
        "SchedulerLimits": "",
        "AuditConfig": "",
        "runtime.scheduler.Audit": "*",
        "RequestHandle": "cancel result finish_reason text logprobs prompt_logprobs cached_tokens",
    },
    "Make a bundle": {
        "probe": "",
        "export": "",
        "ExportRequest": "",
        "calibrate": "",
        "TideConfig": "resolve_checkpoints from_options",
    },
    "Train": {
        "adapt": "",
        "AdaptConfig": "exits from_options",
        "draft": "",
        "DraftConfig": "from_options",
        "drafting.report.DraftReport": "as_dict render",
    },
    "Check, tune and time a bundle": {
        "validate": "",
        "tune": "",
        "tuning.request.ExitRequest": "",
        "tuning.request.LosslessRequest": "",
        "bench": "",
    },
    "Models whose parts cannot be found": {"ModelStructure": "", "register_adapter": ""},
}
SIGNATURES = {"export": "export(model, output, **options) -> Path"}  # a decorator makes the request of the options


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Returns the text of each page by its path."""
    house = DOCS / "architecture" / "index.md"
    before, rest = house.read_text().split(BEGIN)
    return {
        DOCS / "reference" / "cli.md": f"{CLI}\n{commands(build_parser())}\n",
        DOCS / "reference" / "api.md": f"{API}\n{api()}\n",
        house: f"{before}{BEGIN}{floors()}\n{END}{rest.split(END)[1]}",
    }


def api() -> str:
    """Returns the public names as Markdown, a section each."""
    package = griffe.load(structure.PACKAGE, search_paths=[ROOT], docstring_parser="google", docstring_options=QUIET)
    blocks = []
    for group, names in NAMES.items():
        blocks.append(f"## {group}")
        for name, members in names.items():
            described = package[name].final_target if package[name].is_alias else package[name]
            blocks += [f"### {described.name}", *_described(described, f"{structure.PACKAGE}.{name}")]
            for member in _members(described) if members == "*" else members.split():
                blocks += [f"#### {described.name}.{member}", *_described(described[member], member)]
    errors = package["errors"].classes.values()
    rows = [f"| `{one.name}` | `{one.bases[0]}` | {_line(one.docstring.value)} |" for one in errors]
    table = "\n".join(["| class | is a | meaning |", "| --- | --- | --- |", *rows])
    return "\n\n".join([*blocks, "## Errors", table])


def _members(described: griffe.Object) -> Iterator[str]:
    for name, member in described.members.items():
        if not name.startswith("_") and (member.is_function or "property" in member.labels):
            yield name


def _described(described: griffe.Object, path: str) -> Iterator[str]:
    """Yields the blocks of Markdown that describe a class, function or property named `path`."""
    if described.is_function:
        signature = SIGNATURES.get(described.name) or _signature(described)
        yield f"```python\n{path.removesuffix(described.name)}{signature}\n```"
    elif described.is_class:
        yield f"`{path}`"
    for section in described.docstring.parsed if described.docstring else ():
        if section.kind is griffe.DocstringSectionKind.text:
            yield _escaped(section.value)
        elif described.is_function and section.kind is griffe.DocstringSectionKind.returns:
            yield f"Returns: {_line(' '.join(one.description for one in section.value))}"
        else:
            titled = described.is_function or section.kind is griffe.DocstringSectionKind.raises
            title = f"{section.kind.value.capitalize()}:\n\n" if titled else ""
            yield title + "\n".join(f"- {_item(one, described)}" for one in section.value)


def _item(item: griffe.DocstringElement, described: griffe.Object) -> str:
    """Returns a parameter, a field with its default or an error, with what the docstring says of it."""
    if isinstance(item, griffe.DocstringRaise):
        return f"`{item.annotation}`: {_line(item.description)}"
    field = described.members.get(item.name) if "dataclass" in described.labels else None
    default = field.value if field else None
    if isinstance(default, griffe.ExprName):  # a constant
        default = described.modules_collection[default.canonical_path].value
    written = f" (`{default}`)" if default is not None and "field(" not in str(default) else ""
    return f"`{item.name}`{written}: {_line(item.description)}"


def _signature(function: griffe.Function) -> str:
    """Returns a function's signature, with a parameter a line where it is long."""
    written = re.sub(r"^(\w+)\((?:self|cls)(?:, )?", r"\1(", function.signature())
    if len(written) <= LONGEST:
        return written
    given, _, returned = written.partition("(")[2].rpartition(")")
    lines = re.split(r", (?=\*{0,2}\w+(?::|=|,|$)|\*,|/)", given)
    return "\n".join([f"{function.name}(", *(f"    {line}," for line in lines), f"){returned}"])


def _line(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Returns text in which what is not code keeps its `<` and `*`."""
    return re.sub(r"(`[^`]*`)|([<*])", lambda found: found[1] or f"\\{found[2]}", text)


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


if __name__ == "__main__":
    main()
