"""The two sizes of the suite: `make test` for every change, `make test-all` (TIDE_TEST_ALL=1) for everything.

Tests marked `exhaustive` run in `make test-all` alone, and what takes a number of cases takes more of them there.
"""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

ALL = os.environ.get("TIDE_TEST_ALL") == "1"

T = TypeVar("T")


def sized(usual: T, exhaustive: T) -> T:
    """The first in `make test`, the second in `make test-all`."""
    return exhaustive if ALL else usual


def exhaustive_beyond(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` takes the first `count`."""
    return [
        value if number < count else pytest.param(*_arguments(value), marks=pytest.mark.exhaustive)
        for number, value in enumerate(values)
    ]


def exhaustive_but(usual: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` takes those in `usual`."""
    usual, values = list(usual), list(values)
    assert all(one in values for one in usual), "each of the usual parameters must be one of the test's"
    return [
        value if value in usual else pytest.param(*_arguments(value), marks=pytest.mark.exhaustive) for value in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    """Those of pytest.param: a plain tuple is several, for a test of several parameters."""
    return tuple(value) if type(value) is tuple else (value,)
