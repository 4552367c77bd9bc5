"""Checks users' values (whole and real numbers, text, JSON) and refuses each in one sentence.

All engines and commands share these checks. The C++ runtime has the same limits.
"""

import json
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

from tide_export.errors import GenerationError, TideError

MAX_WHOLE = 2**63 - 1  # the largest int64, the type of counts in C++ and the graphs
MAX_SHOWN = 80  # characters of a refused value in a message


def whole_number(
    name: str, value: Any, minimum: int, maximum: int = MAX_WHOLE, error: type[TideError] = GenerationError
) -> int:
    """Returns `value` (int or NumPy integer, not bool) as an int.

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
    """Returns `value` (int, float or NumPy number, not bool) as a finite float.

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


def not_negative(name: str, value: Any, error: type[TideError] = GenerationError) -> float:
    """Returns `value` as a finite float, 0 or more.

    Raises:
        error: it is not; the message names it `name`.
    """
    number = real_number(name, value, error)
    if number < 0:
        raise error(f"{name} must be a finite number, 0 or more, not {value!r}")
    return number


class Limits(NamedTuple):
    """The numbers that an option may be: from `low` on, or only above it, to `high`."""

    low: float
    high: float = inf
    above: bool = False

    def checked(self, name: str, value: Any) -> float:
        """Returns `value` as a float.

        Raises:
            GenerationError: it is not a finite number within the limits; the message names it `name`.
        """
        number = real_number(name, value)
        if (self.low < number if self.above else self.low <= number) and number <= self.high:
            return number
        if self.above:
            rule = f"be above {self.low}" + (f" and at most {self.high}" if isfinite(self.high) else "")
        else:
            rule = f"lie in [{self.low}, {self.high}]" if isfinite(self.high) else f"be {self.low} or more"
        raise GenerationError(f"{name} must {rule}, not {number!r}")


def check_names(
    what: str, given: Iterable[str], known: Iterable[str], error: type[TideError] = GenerationError
) -> None:
    """Raises `error` for a name that is not known; the message adds the nearest that is."""
    known = list(known)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise error(f"{what} {name!r}" + "".join(f": did you mean {one!r}?" for one in near))


class Options:
    """A base of dataclasses of a user's options: a misspelt field is a TideError, not a TypeError."""

    error: ClassVar[type[TideError]] = GenerationError

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Checks the names of the fields."""
        check_names(f"{cls.__name__} has no option", options, getattr(cls, "__dataclass_fields__", ()), cls.error)
        return super().__new__(cls)


def shown(value: object) -> str:
    """Returns a refused value for a message: on one line, at most MAX_SHOWN characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4300 digits, or of an object's own `__repr__`
        text = f"this {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def check_text(what: str, text: str, error: type[TideError] = GenerationError) -> None:
    """Checks that text can be encoded as UTF-8.

    Raises:
        error: it has lone surrogates, from a command line in another encoding or from JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        broken = text[failure.start]
        raise error(f"{what} is not valid Unicode: its character {failure.start + 1} is {broken!a}") from None


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parses JSON.

    Args:
        hooks: arguments of `json.loads` for parsing numbers.

    Raises:
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
