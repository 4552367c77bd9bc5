"""Separates tool calls from the rest of a model's text as it arrives."""

import json
import re
import uuid
from collections.abc import Collection, Generator
from dataclasses import dataclass

from tide_export.common.values import parse_json
from tide_export.serving.tool_forms import ToolForm

KEYS = ("arguments", "parameters")
NAMED = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True)
class Part:
    """A piece of a model's answer: text, or, with a number, a piece of that call.

    The first piece of a call has id and name, later ones have arguments as `text`.
    """

    text: str
    number: int | None = None
    id: str = ""
    name: str = ""


class CallReader:
    """Reads one answer.

    Anything but a call of a known tool is returned as text, unchanged; white space around calls is dropped.

    Attributes:
        calls: number of calls that have begun.
        done: only one call is wanted, and it has ended.
    """

    def __init__(self, form: ToolForm, names: Collection[str], several: bool) -> None:
        """Starts before the first piece.

        Args:
            names: the names of the tools.
            several: whether more than one call is wanted.
        """
        self.calls, self.done = 0, False
        self._form, self._names, self._several = form, names, several
        self._left, self._ended, self._parts = "", False, list[Part]()
        self._cut = False  # the text ended in a call
        self._reading = self._read()

    def push(self, text: str, ended: bool = False) -> list[Part]:
        """Returns the parts that a piece of text completes; all of the rest if the text has `ended`."""
        self._left, self._ended, self._parts = self._left + text, ended, []
        next(self._reading, None)
        return self._parts

    # Reading is a generator that yields when it needs more text, and is resumed with more or at the end.

    def _read(self) -> Generator[None]:
        mark = self._form.mark
        while not self.done:
            if (at := self._left.find(mark)) < 0:
                self._say_certain()
                if self._ended:
                    return
                yield
                continue
            before = self._left[:at]
            self._say(len(before.rstrip()))
            space = self._left[: len(self._left) - len(self._left.lstrip())] if mark else ""
            self._left = self._left[len(space) :]
            called = yield from self._marked()
            if not called:
                self._left = space + self._left
                self._say(len(space + mark))
            if not mark and not self.done:  # without a mark, calls can only begin the text
                while not self._ended:
                    self._say(len(self._left))
                    yield
                self._say_certain()
                return

    def _marked(self) -> Generator[None, None, bool]:
        """Reads the calls at a mark; False: there are none, and nothing was read."""
        form = self._form
        while (head := form.head.match(self._left)) and head.end() == len(self._left):
            if self._ended:
                return False
            yield
        if head is None or not (yield from self._object(head.end(), head.groupdict().get("name"))):
            return False
        while self._several and form.between and (yield from self._follows(form.between)):
            while not self._left.strip() and not self._ended:
                yield
            if not (yield from self._object(len(self._left) - len(self._left.lstrip()), None)):
                return True
        self.done = not (self._several or self._cut)
        if form.end and not self.done:
            yield from self._follows(form.end)
        return True

    def _object(self, start: int, name: str | None) -> Generator[None, None, bool]:
        """Reads the JSON object of a call; False: there is none, and nothing was read.

        Args:
            start: position of the object.
            name: name of the function, if the object holds only its arguments.
        """
        if not self._left.startswith("{", start):
            return False
        whole, at, wrapped = _Object(), start, name is None
        while name is None:
            if match := NAMED.match(self._left, start):
                name, start = match["name"], match.end()
            elif (end := whole.end(self._left, at)) is not None:
                return self._complete(start, end)
            elif self._ended:
                return False
            else:
                at = len(self._left)
                yield
        if name not in self._names:
            return False
        number = self._begin(name)
        self._left = self._left[start:]
        yield from self._until_end(_Object(), number)
        if wrapped:
            yield from self._until_end(_Object(depth=1), None)
        return True

    def _until_end(self, value: "_Object", number: int | None) -> Generator[None]:
        """Reads to the end of an object: the arguments of call `number`, or dropped if that is None."""
        while True:
            end = value.end(self._left, 0)
            piece, self._left = self._left[:end], "" if end is None else self._left[end:]
            if piece and number is not None:
                self._parts.append(Part(piece, number))
            if end is not None:
                return
            if self._ended:
                self._cut = True
                return
            yield

    def _complete(self, start: int, end: int) -> bool:
        """Reads a complete object whose arguments could not be returned as they arrived."""
        try:
            value = parse_json(self._left[start:end])
            arguments = next((value[key] for key in KEYS if key in value), None)
            if value.get("name") not in self._names or not isinstance(arguments, dict | str | None):
                return False
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        except ValueError:  # also a number that is beyond every float
            return False
        text = arguments.encode(errors="backslashreplace").decode()  # half of a surrogate pair, as JSON escapes it
        self._parts.append(Part(text, self._begin(value["name"])))
        self._left = self._left[end:]
        return True

    def _begin(self, name: str) -> int:
        # Mistral's templates take only ids of nine letters and digits.
        self._parts.append(Part("", self.calls, uuid.uuid4().hex[:9], name))
        self.calls += 1
        return self.calls - 1

    def _follows(self, text: str) -> Generator[None, None, bool]:
        """Reads `text` after white space; False: another text follows, and nothing was read."""
        while not (left := self._left.lstrip()).startswith(text):
            if self._ended or not text.startswith(left):
                return False
            yield
        self._left = left[len(text) :]
        return True

    def _say_certain(self) -> None:
        """Returns the text that cannot belong to a mark or to white space before one; at the end, all."""
        mark, text = self._form.mark, self._left
        if self._ended:
            self._say(len(text))
        else:
            begun = next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:n]))
            self._say(len(text[: len(text) - begun].rstrip()))

    def _say(self, length: int) -> None:
        text, self._left = self._left[:length], self._left[length:]
        if text and not (self.calls and self._ended and text.isspace()):
            self._parts.append(Part(text))


class _Object:
    """Finds the end of a JSON object that arrives piece by piece."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def end(self, text: str, start: int) -> int | None:
        """Returns the object's end in a text that is new from `start` on; None: not reached."""
        for at in range(start, len(text)):
            one = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = one == "\\", one != '"'
            elif one == '"':
                self._quoted = True
            elif one in "{[":
                self._depth += 1
            elif one in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None
