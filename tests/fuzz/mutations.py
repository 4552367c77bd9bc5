"""Mutations of JSON values and of bytes, drawn by a `random.Random`, which Hypothesis controls in the tests."""

import json
from random import Random
from typing import Any

STRINGS = ("", "x", "\0", "a\nb", "../x", "/etc/passwd", "a\\b", "é", "\U0001f600", "tide.json", "segment_00", "0", "²")
NUMBERS = (0, 1, -1, 2, 3, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64), 10**30)
REALS = (0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-5, 1e-4, 1e15, 1e16, 1e22, 1e300, 5e-324, 0.1, 123456.789)
VALUES = (None, True, False, [], {}, [[]], {"a": 1}, *STRINGS, *NUMBERS, *REALS)
# Texts that no encoder writes.
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 401,
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\ud83d\\ude00"',
)
RAW += (
    "[" * 99 + "]" * 99,
    "[" * 101 + "]" * 101,
    "01",
    "1.",
    "+1",
    "-",
    "1e400",
    '"\x01"',
    '"\\x"',
    "//",
    "tru",
    "-0",
    "1E2",
    f"0.{'0' * 400}1e1",
    f"1{'0' * 400}e-1",
    "-1e-400",
)
MARK = "@@RAW@@"


def mutated_json(random: Random, value: Any, times: int = 3) -> str:
    """The text of a JSON value with up to `times` changes of its structure."""
    value = _copy(value)
    raw = None
    for _ in range(random.randint(1, times)):
        containers = [entry for entry in _containers(value) if entry]
        if not containers:
            break
        container = random.choice(containers)
        key = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
        change = random.randrange(8)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[random.choice(STRINGS)] = _copy(container[key])
        elif change == 2 and isinstance(container, list):
            container.append(_copy(container[key]))
        elif change == 3:
            other = random.choice(containers)
            container[key] = _copy(random.choice([other, *_leaves(other)]))
        elif change == 4:
            container[key] = MARK
            raw = random.choice(RAW)
        elif change == 5 and isinstance(container[key], int | float):
            container[key] += random.choice((-1, 1, 2, 1000))
        else:
            container[key] = _copy(random.choice(VALUES))
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    return text if raw is None else text.replace(f'"{MARK}"', raw)


def mutated_bytes(random: Random, data: bytes, times: int = 4) -> bytes:
    """`data` with up to `times` bytes or stretches changed, lost, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(random.randint(1, times)):
        start = random.randrange(len(changed) + 1)
        end = min(len(changed), start + random.choice((1, 1, 1, 2, 8, 64)))
        change = random.randrange(7)
        if change == 0:
            changed[start:end] = b""
        elif change == 1:
            changed[start:start] = changed[start:end]
        elif change == 2:
            changed[start:end] = bytes(random.randrange(256) for _ in range(end - start))
        elif change == 3 and start < end:
            changed[start] ^= 1 << random.randrange(8)
        elif change == 4:
            changed[start:start] = random.choice(
                (b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"[", b"{", b"}", b",", b"1", b"\xed\xa0\x80")
            )
        elif change == 5 and random.random() < 0.2:
            del changed[start:]
        else:
            changed[start:end] = bytes([random.choice((0, 1, 0x7F, 0x80, 0xFF))]) * (end - start)
    return bytes(changed)


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _containers(value: Any) -> list[Any]:
    if not isinstance(value, list | dict):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(entry for child in inner for entry in _containers(child))]


def _leaves(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)
