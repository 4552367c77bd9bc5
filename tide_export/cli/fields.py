"""Makes command-line options from fields of settings, and function arguments from options."""

import argparse
from collections.abc import Callable
from inspect import signature
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from tide_export.runtime.config import Number

METAVARS = {int: "N", float: "X"}
# Options of the command line itself; all others are named like the parameter they are given for.
OWN_OPTIONS = ("command", "quiet", "verbose", "debug", "json")


def given(options: argparse.Namespace, function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Returns the options given by the user, by parameter name.

    Args:
        function: keep only its parameters; None: keep all.
    """
    values = {name: value for name, value in vars(options).items() if value is not None and name not in OWN_OPTIONS}
    names = values if function is None else signature(function).parameters
    return {name: value for name, value in values.items() if name in names}


def field_option(name: str, field: "FieldInfo") -> dict[str, Any]:
    """Returns help, type, and choices or metavar for the option of a field."""
    default = field.default
    shown = "" if default in (None, ()) else f" ({_shown(default)})"
    return {"help": f"{field.description}{shown}", **_field_type(name, field)}


def number_option(number: "Number") -> dict[str, Any]:
    """Returns help, type and metavar for an option of a generation that is a number."""
    return {"help": f"{number.help} ({number.default:g})", "type": number.kind, "metavar": METAVARS[number.kind]}


def yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not yes or no")
    return text == "yes"


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 4,8") from None


def _layers(text: str) -> str | tuple[int, ...]:
    if text in ("auto", "none"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        wanted = "auto or none, nor a list of layer counts such as 3,6,9"
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _field_type(name: str, field: "FieldInfo") -> dict[str, Any]:
    """Returns type, and choices or metavar for the option of a field."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType] or [field.annotation]
    if get_origin(field.annotation) is Literal:
        return {"choices": get_args(field.annotation)}
    if name == "checkpoints":
        return {"type": _layers, "metavar": "N,N"}
    if get_origin(field.annotation) is tuple:
        return {"type": get_args(field.annotation)[0], "action": "append", "metavar": "SPEC"}
    if kinds == [bool]:
        return {"type": yes_or_no, "metavar": "X"}
    text = "PROMPTS" if name == "self_generated" else "SPEC"
    return {"type": kinds[0], "metavar": METAVARS.get(kinds[0], text)}
