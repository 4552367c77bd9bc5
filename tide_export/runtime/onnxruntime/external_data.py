"""Finds the weights that a network keeps in another file, so that a session gets them from memory, not by a path.

Reads just these fields of onnx.proto from the protobuf wire format: the `onnx` package is not needed to run a bundle.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

# Field numbers in onnx.proto.
GRAPH, INITIALIZER = 7, 5
DIMS, DATA_TYPE, NAME, EXTERNAL_DATA = 1, 2, 8, 13
KEY, VALUE = 1, 2

# Bytes of an element, by TensorProto.DataType: float, uint8, int8, uint16, int16, int32, int64, bool, float16, double,
# uint32, uint64, bfloat16, float8e4m3fn.
ELEMENT_SIZES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2, 17: 1}
INT4 = 22  # whose elements are packed in pairs, the first in the low half of a byte

Field = tuple[int, int | memoryview]
T = TypeVar("T", int, memoryview)


class ExternalTensor(NamedTuple):
    """An initializer whose data are in the file `location`; `dtype` is a TensorProto.DataType."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    location: str
    offset: int


def external_tensors(model: bytes) -> list[ExternalTensor]:
    """The initializers of a model's graph that are stored in other files.

    Raises:
        ValueError: `model` is no ONNX model.
    """
    return [
        _external(tensor)
        for graph in _all(_fields(memoryview(model)), GRAPH, memoryview)
        for tensor in _all(_fields(graph), INITIALIZER, memoryview)
        if any(number == EXTERNAL_DATA for number, _ in _fields(tensor))
    ]


def _external(tensor: memoryview) -> ExternalTensor:
    fields = list(_fields(tensor))
    entries = (list(_fields(entry)) for entry in _all(fields, EXTERNAL_DATA, memoryview))
    place = {_text(entry, KEY): _text(entry, VALUE) for entry in entries}
    (dtype,) = _all(fields, DATA_TYPE, int)
    offset = int(place.get("offset", "0"))
    return ExternalTensor(_text(fields, NAME), dtype, tuple(_dims(fields)), place.get("location", ""), offset)


def _dims(tensor: Iterable[Field]) -> Iterator[int]:
    for number, value in tensor:
        if number == DIMS and isinstance(value, int):
            yield value
        elif number == DIMS and isinstance(value, memoryview):  # packed
            at = 0
            while at < len(value):
                size, at = _varint(value, at)
                yield size


def _text(message: Iterable[Field], wanted: int) -> str:
    return b"".join(_all(message, wanted, memoryview)).decode()


def _all(message: Iterable[Field], wanted: int, kind: type[T]) -> Iterator[T]:
    """The values of a field."""
    for number, value in message:
        if number == wanted:
            if not isinstance(value, kind):
                raise ValueError(f"field {number} is of another type")
            yield value


def _fields(message: memoryview) -> Iterator[Field]:
    """The number and value of every field: an integer, or the bytes of what is longer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind}")
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if size > len(message) - at:
            raise ValueError("a field ends after its message")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The variable-length integer at `at`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("an integer that does not end")
