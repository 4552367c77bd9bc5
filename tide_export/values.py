"""Checks the values that a user gives: whole and real numbers, text and JSON, each refused in one sentence.

All engines and commands share these, so that what one takes the others take. The C++ runtime has the same limits.
"""

import json
import operator
from math import isfinite
from numbers import Real
from typing import Any

from tide_export.errors import GenerationError, TideError

MAX_WHOLE = 2**63 - 1  # the largest int64, which C++ and the graphs count in
MAX_SHOWN = 80  # characters of a refused value in a message


def whole_number(
    name: str, value: Any, minimum: int, maximum: int = MAX_WHOLE, error: type[TideError] = GenerationError
) -> int:
    """`value` (int or NumPy integer, no bool) as an int.

    Raises:
        error: it is not a whole number from `minimum` to `maximum`; the message names it `name`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:  # of any object's own `__index__`
        number = None
    if number is not None and minimum <= number <= maximum:
        return number
    small = maximum == MAX_WHOLE and (number is None or number < minimum)
    limits = f", {minimum} or more" if small else f" from {minimum} to {maximum}"
    raise error(f"{name} must be a whole number{limits}, not {shown(value)}")


def real_number(name: str, value: Any, error: type[TideError] = GenerationError) -> float:
    """`value` (int, float or NumPy number, no bool) as a finite float.

    Raises:
        error: it is not a finite number; the message names it `name`.
    """
    try:
        scalar = value[()] if getattr(value, "ndim", None) == 0 else value  # a NumPy array of one number
        number = float(scalar) if isinstance(scalar, Real) and not isinstance(scalar, bool) else None
    except Exception:  # an int beyond every float, or of an object's own `__float__`
        number = None
    if number is None or not isfinite(number):
        raise error(f"{name} must be a number, not {shown(value)}")
    return number


def shown(value: object) -> str:
    """A refused value on one line of a message, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4300 digits, or of an object's own `__repr__`
        text = f"this {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def check_text(what: str, text: str, error: type[TideError] = GenerationError) -> None:
    """Raises `error` for text that has no UTF-8 form: of a command line in other bytes, or of JSON with half a
    surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        broken = text[failure.start]
        raise error(f"{what} is not valid Unicode: its character {failure.start + 1} is {broken!a}") from None


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """What the JSON `text` holds. Raises ValueError: it is not JSON, or nested too deeply.

    Args:
        hooks: those of `json.loads` for numbers.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
