"""Passes Python callbacks of a request to the library: logits processor, grammar and detokenizer.

Each is called in the thread that runs the steps. No exception may cross C, so what a callback raises is kept and raised
again where the request is read.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_size_t
from typing import Any

import numpy as np

from tide_export.errors import ConstraintError, GenerationError, TideError, first_line
from tide_export.runtime import native
from tide_export.runtime.grammar import GrammarState

LogitsProcessor = Callable[[list[int], np.ndarray], np.ndarray]


class Hooks:
    """Holds the callbacks of one request; must live until the request has ended.

    Attributes:
        error: the exception of the callback that failed; None: none has, or `native` keeps it (a signal handler's).
        struct: the tide_hooks.
    """

    def __init__(
        self,
        prompt_tokens: int,
        processor: LogitsProcessor | None = None,
        grammar: GrammarState | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Wraps the callbacks that are given.

        Args:
            prompt_tokens: the length of the prompt, which the grammar does not read.
            decode: returns the text of token ids; None: the library needs no text.
        """
        self.error: BaseException | None = None
        self._processor, self._grammar, self._decode = processor, grammar, decode
        self._prompt_tokens, self._text = prompt_tokens, ctypes.create_string_buffer(0)
        self.struct = native.HooksStruct(reports=1)
        self._report = native.library().tide_report
        if processor is not None or grammar is not None:
            self.struct.process_logits = native.ProcessLogits(self._process_logits)
        if grammar is not None:
            self.struct.allows_token = native.AllowsToken(self._allows_token)
        if decode is not None:
            self.struct.detokenize = native.Detokenize(self._detokenize)

    def error_of(self, status: int) -> BaseException:
        """Returns the error of the request; raises an exception of a signal handler in a callback."""
        native.raise_interrupt()
        error, self.error = self.error, None
        return native.error_of(status) if error is None else error

    def _process_logits(self, _: Any, ids: int, count: int, logits: int, vocabulary: int) -> int:
        try:
            values = np.ctypeslib.as_array((c_float * vocabulary).from_address(logits))
            text = _ids_at(ids, count)
            if self._processor is not None:
                values[:] = _processed(self._processor, text, values.copy())
            if self._grammar is not None:
                self._grammar.read(text[self._prompt_tokens :])
                values[~self._grammar.mask()] = -np.inf
            self._report(native.OK)
        except BaseException as error:
            self._failed(error, "logits_processor failed")
        return native.OK  # ignored: `_report` gives the status

    def _allows_token(self, _: Any, ids: int, count: int, token: int) -> int:
        assert self._grammar is not None
        try:
            self._grammar.read(_ids_at(ids, count)[self._prompt_tokens :])
            allowed = int(self._grammar.allows(token))
            self._report(native.OK)
            return allowed
        except BaseException as error:
            self._failed(error, "the grammar failed")
            return 0

    def _detokenize(self, _: Any, ids: int, count: int, size: Any) -> int | None:
        assert self._decode is not None
        try:
            text = self._decode(_ids_at(ids, count)).encode()
            self._text = ctypes.create_string_buffer(text, len(text) + 1)
            size[0] = c_size_t(len(text)).value
            address = ctypes.addressof(self._text)
            self._report(native.OK)
            return address
        except BaseException as error:
            self._failed(error, "the detokenizer failed")
            return None

    def _failed(self, error: BaseException, what: str) -> None:
        self._report(native.CONSTRAINT_ERROR if isinstance(error, ConstraintError) else native.GENERATION_ERROR)
        if not isinstance(error, Exception) and native.keep_interrupt(error):
            return
        if isinstance(error, TideError) or not isinstance(error, Exception):
            self.error = error
        else:
            self.error = GenerationError(f"{what}: {first_line(error)}")
            self.error.__cause__ = error


def _processed(processor: LogitsProcessor, ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Applies a caller's logits processor and checks the shape of the result."""
    changed = np.asarray(processor(ids, logits), np.float32)
    if changed.shape != logits.shape:
        raise GenerationError(
            f"logits_processor must return logits of shape {list(logits.shape)}, not {list(changed.shape)}"
        )
    return changed


def _ids_at(address: int, count: int) -> list[int]:
    return np.frombuffer(ctypes.string_at(address, 8 * count), np.int64).tolist()
