"""Checks that a tokenizer can encode every text and does not let text grow without bound.

A tokenizer.json describes steps that rewrite text, so a file of a few hundred bytes can turn one character into
gigabytes. The bound on the growth comes from the file alone. The time of the tokenizer's regular expressions is not
bounded.
"""

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tide_export.errors import TideError, one_line

MAX_GROWTH = 1000  # output bytes per input byte
MAX_STEPS = 1000
PROBE = "a 1\n\U00013080\ua66e"  # with characters that hardly any vocabulary has
PARTS = {"encoding": ("normalizer", "pre_tokenizer", "post_processor"), "decoding": ("decoder",)}


class Step(NamedTuple):
    """A bound on one step: it replaces characters in `reads` by ones in `writes`, `growth` times as long.

    None stands for all characters.
    """

    reads: frozenset[str] | None
    writes: frozenset[str] | None
    growth: float


def check_tokenizer(tokenizer: Any, what: str, error: type[TideError]) -> None:
    """Checks a `tokenizers.Tokenizer`; `what` names it in the message.

    Raises:
        error: its steps may let text grow more than MAX_GROWTH times, or it cannot encode every text.
    """
    for direction, parts in PARTS.items():
        steps: list[Step] = []
        for part in parts:
            component = getattr(tokenizer, part)
            try:
                described = {} if component is None else json.loads(component.__getstate__())
            except Exception:  # a component written in Python, which no file holds
                continue
            for missing in _undefined(described):
                raise error(f"{what} is not usable: its {part} adds the token {missing!r} and does not define it")
            steps += _steps(described)
        if growth(steps) > MAX_GROWTH:
            raise error(f"{what} is refused: its {direction} may make text more than {MAX_GROWTH} times as long")
    with tokenizer_errors(f"{what} cannot encode every text", error):
        tokenizer.encode(PROBE)


@contextmanager
def tokenizer_errors(what: str, error: type[TideError]) -> Iterator[None]:
    """Converts exceptions and Rust panics of tokenizers into `error`, whose message starts with `what`."""
    try:
        yield
    except TideError:
        raise
    except BaseException as reason:
        if isinstance(reason, Exception) or type(reason).__name__ == "PanicException":  # a BaseException
            raise error(f"{what}: {one_line(reason)}") from reason
        raise


def growth(steps: list[Step]) -> float:
    """Returns an upper bound on the growth of text by all `steps`, in bytes per byte.

    Steps multiply only if a later one reads characters that an earlier one writes. Unicode normalization does not
    count: it is idempotent and makes text at most 11 times as long.
    """
    if len(steps) > MAX_STEPS:
        return float("inf")
    bounds: list[float] = []
    for step in steps:
        before = [bound for bound, earlier in zip(bounds, steps, strict=False) if _meet(earlier.writes, step.reads)]
        bounds.append(max(1.0, step.growth) * max(before, default=1.0))
    return max(bounds, default=1.0)


def _meet(writes: frozenset[str] | None, reads: frozenset[str] | None) -> bool:
    return writes is None or reads is None or not writes.isdisjoint(reads)


def _steps(described: dict[str, Any]) -> Iterator[Step]:
    """Yields the steps of a component described by tokenizers, those of a sequence in order."""
    kind = described.get("type")
    if kind == "Sequence":
        for inner in next((value for value in described.values() if isinstance(value, list)), []):
            yield from _steps(inner)
    elif kind == "Replace":
        yield _replacement(described["pattern"], described["content"])
    elif kind == "ByteLevel":
        yield Step(None, None, 2.0)  # every byte becomes a character of one or two
    elif kind == "Precompiled":
        table = b64decode(described["precompiled_charsmap"] or "")
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        yield Step(None, None, float(max(map(len, texts))))
    elif kind == "TemplateProcessing":
        sequences = sum("Sequence" in piece for piece in described["single"])
        yield Step(None, None, float(sequences))
    else:
        yield Step(None, None, 1.0)


def _replacement(pattern: dict[str, str], content: str) -> Step:
    written, size = frozenset(content), len(content.encode())
    if literal := pattern.get("String"):
        return Step(frozenset(literal), written, size / len(literal.encode()))
    try:  # the module has no public function for the length of the shortest match; without it, the bound is stricter
        width = re._parser.parse(pattern.get("Regex", "")).getwidth()[0]  # type: ignore[attr-defined]
    except Exception:  # a pattern that Python does not know
        width = 0
    return Step(None, written, size / width if width else 1.0 + size)


def _undefined(described: dict[str, Any]) -> Iterator[str]:
    """Yields special tokens that a template uses and does not define."""
    for inner in described.get("processors", ()):
        yield from _undefined(inner)
    if described.get("type") == "TemplateProcessing":
        for piece in (*described["single"], *described["pair"]):
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in described["special_tokens"]:
                yield name
