"""Checks of single generation options: `engine` and `sampling` refuse each with the same kind of sentence.

All are called before a step is run, so that a bad option costs no work and leaves nothing behind.
"""

import operator
from math import isfinite
from typing import Any

from tide_export.errors import GenerationError


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` (int or numpy integer, no bool) as an int.

    Raises:
        GenerationError: it is not a whole number or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise GenerationError(f"{name} must be a whole number, {least} or more, not {value!r}")
    return number


def real_number(name: str, value: Any) -> float:
    """`value` (int, float or numpy number, no bool) as a finite float.

    Raises:
        GenerationError: it is not a finite number.
    """
    try:
        number = float(value) if not isinstance(value, bool | str | bytes) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not isfinite(number):
        raise GenerationError(f"{name} must be a number, not {value!r}")
    return number
