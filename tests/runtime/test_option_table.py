"""One table of the options of a generation: Python, command line, server and documentation agree with it.

The fields, the JSON, the checks and the example of C++ are made of it, so that `min_p` is in four files.
"""

import argparse
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from option_table import Row, option_rows
from pydantic import ValidationError

from tide_export.cli.options import build_parser
from tide_export.common.values import Limits
from tide_export.errors import GenerationError
from tide_export.runtime.config import NUMBERS, GenerationConfig
from tide_export.runtime.request import OWN
from tide_export.serving.protocol import CompletionRequest

ROOT = Path(__file__).parents[2]
ROWS = option_rows()
KINDS = {"std::int64_t": int, "double": float}
LIMITS: dict[str, Any] = {
    "at_least": Limits,
    "within": Limits,
    "above": lambda low, *high: Limits(low, *high, above=True),
    "unlimited": None,
}
EACH = {"threshold", "seed"}  # a number, or several
DEFAULTS = {"{}": None, "false": False, "Mode::automatic": "auto"}
WITH_DEFAULT = {name: number for name, number in NUMBERS.items() if number.default is not None}


def default_of(row: Row) -> Any:
    return DEFAULTS[row.default] if row.default in DEFAULTS else float(row.default)


def test_python_has_the_fields_of_the_table() -> None:
    here = {field.name: field.default for field in fields(GenerationConfig) if field.name not in OWN}
    assert {name: None if default == () else default for name, default in here.items()} == {
        name: default_of(row) for name, row in ROWS.items()
    }


def test_python_s_numbers_are_those_of_the_table() -> None:
    assert NUMBERS.keys() | EACH == {name for name, row in ROWS.items() if row.limits != "unlimited"}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_the_type_and_limits_of_the_table(name: str) -> None:
    row, number = ROWS[name], NUMBERS[name]
    kind = row.type.removeprefix("std::optional<").removesuffix(">")
    assert (number.kind, number.limits) == (KINDS[kind], eval(row.limits, LIMITS))
    assert number.drawn == (row.counts == "drawn")
    assert (number.default is None) == row.type.startswith("std::optional<")


@pytest.mark.parametrize("name", WITH_DEFAULT)
def test_a_number_with_a_default_is_everyone_s(name: str) -> None:
    """The help is Python's docstring, and the server refuses what the library does."""
    number = WITH_DEFAULT[name]
    assert number.help == ROWS[name].help
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    (option,) = [action for action in commands["generate"]._actions if action.dest == name]
    assert (option.type, option.help) == (number.kind, f"{number.help} ({number.default:g})")
    if name == "max_new_tokens":
        return
    low, high, above = number.limits
    for value in (low - 1, *([low] if above else []), *([high + 1] if math.isfinite(high) else [])):
        with pytest.raises(GenerationError, match=name):
            GenerationConfig(**{name: value})
        with pytest.raises(ValidationError, match=name):
            CompletionRequest.model_validate({"model": "m", "prompt": "x", name: value})


def test_the_reference_has_every_option_with_its_default() -> None:
    text = (ROOT / "docs" / "reference" / "decoding.md").read_text()
    listed, _, rest = text.partition("## Which option counts where")
    found = {}
    for names, default in re.findall(r"^- (`\w+`(?:, `\w+`)*) \((.*?)\): ", listed, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), default)
    assert found.keys() == {field.name for field in fields(GenerationConfig)}
    for name, number in WITH_DEFAULT.items():
        assert found[name].partition(":")[0] == f"{number.default:g}", name
    conditions = [line.partition(": ")[0] for line in rest.partition("\n## ")[0].splitlines() if line.startswith("- ")]
    counted = set(re.findall(r"`(\w+)`", " ".join(conditions)))
    assert counted == {name for name, row in ROWS.items() if row.counts != "everywhere"}


def test_a_sampler_s_option_is_in_four_files() -> None:
    """Guides may have it as an example; measurements and the changelog say what was."""
    folders = (ROOT / "tide_export", ROOT / "cpp", ROOT / "docs" / "reference", ROOT / "docs" / "architecture")
    files = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cpp", ".inc", ".md")
    ]
    assert {path.name for path in files if re.search(r"\bmin_p\b", path.read_text())} == {
        "options.inc",
        "sampling.cpp",
        "config.py",
        "decoding.md",
        "api.md",  # generated
    }
