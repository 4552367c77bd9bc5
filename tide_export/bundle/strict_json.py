"""Reads JSON into dataclasses strictly: bounded size and depth, every field present and of its type."""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tide_export.common.values import parse_json
from tide_export.errors import BundleError

MAX_DEPTH = 100  # of nested lists and objects
WHOLE = range(-(1 << 63), 1 << 63)  # int64
SHOWN = 60  # characters of a value or name in a message

T = TypeVar("T")


def parse_strictly(text: str | bytes) -> Any:
    """Parses JSON in UTF-8 without a byte order mark, with finite numbers and no name twice in an object.

    Whole numbers of more than 64 bits become floats, as in C++.

    Raises:
        ValueError: the text is not such JSON, or nested deeper than MAX_DEPTH.
    """
    text = text.decode() if isinstance(text, bytes) else text
    value = parse_json(text, parse_constant=_number, parse_float=_number, parse_int=_whole, object_pairs_hook=_object)
    _check_value(value, 0)
    return value


def parse_object(kind: type[T], value: Any, source: str, omitted: Sequence[str] = ()) -> T:
    """Returns a JSON object as the dataclass `kind`.

    Args:
        source: name of the file, for messages.
        omitted: dotted names of fields that may be missing.

    Raises:
        BundleError: a field is missing, unknown or of another type; the message names `source` and the field.
    """
    return _parse_fields(kind, value, source, "", omitted)


def shown_name(name: str) -> str:
    """Returns a key for a message: printable ASCII of at most SHOWN characters."""
    return json.dumps(name)[1:-1][:SHOWN]


def _object(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(entries)
    if len(value) < len(entries):
        raise ValueError("an object has a name twice")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:SHOWN]} is out of range")
    return value


def _whole(text: str) -> int | float:
    value = int(text) if len(text) <= 20 else None  # int() takes quadratic time
    return value if value is not None and value in WHOLE else _number(text)


def _check_value(value: Any, depth: int) -> None:
    """Checks the depth, and that strings have no lone surrogate, which UTF-8 cannot encode."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list | dict):
        if depth == MAX_DEPTH:
            raise ValueError("nested too deeply")
        for entry in value:
            _check_value(entry, depth + 1)
        for entry in value.values() if isinstance(value, dict) else ():
            _check_value(entry, depth + 1)


def _parse(kind: Any, value: Any, source: str, where: str, omitted: Sequence[str] = ()) -> Any:
    """Returns `value` (from JSON) as the type `kind`; `where` is the dotted field name for the message."""

    def wrong(expected: str) -> BundleError:
        kinds: dict[type, str] = {list: "a list", dict: "an object"}  # not shown: they may be large
        shown = kinds.get(type(value)) or json.dumps(value)[:SHOWN]
        return BundleError(f"{source}: field '{where}' must be {expected}, not {shown}")

    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise wrong("an object")
        return _parse_fields(kind, value, source, where, omitted)
    if isinstance(kind, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        if value is None and NoneType in get_args(kind):
            return None
        if len(options) > 1:
            options = [option for option in options if type(value) is option] or options
        return _parse(options[0], value, source, where, omitted)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise wrong("an object")
        item = get_args(kind)[1]
        return {key: _parse(item, entry, source, f"{where}.{shown_name(key)}") for key, entry in value.items()}
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise wrong("a list")
        items = get_args(kind)
        if items[-1] is Ellipsis:
            items = (items[0],) * len(value)
        if len(items) != len(value):
            raise wrong(f"a list of {len(items)}")
        return tuple(
            _parse(item, e, source, f"{where}.{i}") for i, (item, e) in enumerate(zip(items, value, strict=True))
        )
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong("a number")
        return float(value)
    if type(value) is not kind:  # not isinstance: true is no int
        raise wrong({int: "a whole number", str: "a string", bool: "true or false"}[kind])
    return value


def _parse_fields(kind: type[T], value: dict[str, Any], source: str, where: str, omitted: Sequence[str]) -> T:
    prefix = f"{where}." if where else ""
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for name in names:
        if name not in value and f"{prefix}{name}" not in omitted:
            raise BundleError(f"{source}: field '{prefix}{name}' is missing")
    for name in sorted(value.keys() - set(names)):
        raise BundleError(f"{source}: field '{prefix}{shown_name(name)}' is unknown")
    return kind(
        **{
            name: _parse(hints[name], value[name], source, f"{prefix}{name}", omitted)
            for name in names
            if name in value
        }
    )
