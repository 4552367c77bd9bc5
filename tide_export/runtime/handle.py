"""Reads and cancels a request that was submitted to a scheduler."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Iterator
from ctypes import c_int, c_int64
from typing import Protocol

from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.generation import (
    FinishReason,
    Generation,
    TokenLogprobs,
    finished,
    read_finish_reason,
    read_prompt_logprobs,
    read_stats,
    token_logprobs,
)
from tide_export.runtime.hooks import Hooks
from tide_export.runtime.native import ENDED, Logprob, Owned, created, error_of, library
from tide_export.runtime.stats import ExitStats
from tide_export.runtime.tokenizer import LateText
from tide_export.runtime.watch import Watch

TOKENS_READ = 64  # at most, in one call
TEXT_READ = 1024  # bytes
WAIT_SECONDS = 0.1  # after which a waiting thread runs signal handlers


class Driver(Protocol):
    """Lists the functions of a scheduler that a handle calls."""

    def drive(self) -> bool: ...

    def watch(self) -> Watch: ...

    def forget(self, request: Owned) -> None: ...


class RequestHandle(Iterator[int], AsyncIterator[int]):
    """Reads a submitted request; `for` and `async for` yield its tokens as they are generated.

    Any thread may use it, one at a time.
    """

    def __init__(
        self,
        scheduler: Driver,
        handle: Owned,
        hooks: Hooks | None,
        late: LateText | None,
        config: GenerationConfig,
    ) -> None:
        """Wraps a tide_request.

        Args:
            late: decodes the text if the library does not.
        """
        self._scheduler, self._handle, self._hooks, self._late = scheduler, handle, hooks, late
        self._with_logprobs = config.logprobs is not None
        self._with_prompt_logprobs = config.prompt_logprobs is not None
        self._entries = (Logprob * (1 + (config.logprobs or 0)))()
        self._with_text, self._text, self._text_bytes = bool(config.stop), "", 0  # read so far
        self._logprobs: list[TokenLogprobs] = []
        self._tokens: list[int] = []
        self._returned = 0
        self._ended = False
        self._error: BaseException | None = None
        self._ids, self._status = (c_int64 * TOKENS_READ)(), c_int()

    @property
    def tokens(self) -> list[int]:
        """Tokens generated so far."""
        self._read()
        return self._tokens

    @property
    def error(self) -> BaseException | None:
        """The error that ended the request; None: it has not failed."""
        self._read()
        return self._error

    @property
    def mode(self) -> str:
        """The mode of decoding; for `auto`, the mode that it is for the scheduler's slots."""
        mode: bytes = library().tide_request_mode(self._handle)
        return mode.decode()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None until then, and if it failed."""
        return read_finish_reason(self._so_far())

    @property
    def text(self) -> str | None:
        """Text of the tokens so far, without a possible start of a stop string.

        None: neither `stop` nor `detokenize` was given.
        """
        self._read()
        if self._late is not None:
            return self._late.of(self._tokens, self._ended)
        return self._read_text() if self._with_text else None

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the tokens so far; None: not requested."""
        if not self._with_logprobs:
            return None
        self._read()
        for token in range(len(self._logprobs), len(self._tokens)):
            count = library().tide_request_logprobs(self._handle, token, self._entries, len(self._entries))
            self._logprobs.append(token_logprobs(self._entries[:count]))
        return self._logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt's tokens, after the first new token; None: not requested."""
        return read_prompt_logprobs(self._so_far()) if self._with_prompt_logprobs else None

    @property
    def stats(self) -> ExitStats:
        """Statistics of the tokens so far."""
        return read_stats(self._so_far())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose K/V came from the scheduler's prefix cache."""
        cached: int = library().tide_request_cached_tokens(self._handle)
        return cached

    def cancel(self) -> None:
        """Ends the request before the next step, unless it has ended; its tokens so far stay."""
        library().tide_request_cancel(self._handle)

    def result(self) -> Generation:
        """Waits for the end of the request.

        Raises:
            GenerationError: the request failed.
        """
        for _ in self:
            pass
        wanted = self._with_logprobs, self._with_prompt_logprobs
        return finished(self._so_far(), self.mode, self.text, *wanted)

    def __next__(self) -> int:
        while (token := self._take()) is None:
            if self._ended:
                raise self._end(StopIteration())
            if not self._scheduler.drive():
                library().tide_request_wait(self._handle, len(self._tokens), WAIT_SECONDS)
        return token

    async def __anext__(self) -> int:
        while (token := self._take()) is None:
            if self._ended:
                raise self._end(StopAsyncIteration())
            if self._scheduler.drive():
                await asyncio.sleep(0)  # lets others run between the steps
            else:
                await self._scheduler.watch().news()
        return token

    def _take(self) -> int | None:
        """Returns the next token without waiting; None: there is none yet, or no more."""
        if self._returned == len(self._tokens):
            self._read()
            if self._returned == len(self._tokens):
                return None
        self._returned += 1
        return self._tokens[self._returned - 1]

    def _end(self, otherwise: Exception) -> BaseException:
        return otherwise if self._error is None else self._error

    def _read(self) -> None:
        """Reads the tokens generated since the last call, and whether the request has ended."""
        while not self._ended:
            status = ctypes.byref(self._status)
            count = library().tide_request_read(self._handle, len(self._tokens), self._ids, TOKENS_READ, status)
            self._tokens += self._ids[:count]
            if self._status.value > ENDED:
                value = self._status.value
                self._error = error_of(value) if self._hooks is None else self._hooks.error_of(value)
            self._ended = self._status.value >= ENDED
            if self._ended:
                self._scheduler.forget(self._handle)
            if count < TOKENS_READ:
                return

    def _read_text(self) -> str:
        """Reads the text since the last call; returns all of it."""
        room, piece = ctypes.create_string_buffer(TEXT_READ), b""
        while count := library().tide_request_text(self._handle, self._text_bytes + len(piece), room, TEXT_READ):
            piece += room.raw[: min(count, TEXT_READ)]
        self._text_bytes += len(piece)
        self._text += piece.decode(errors="replace")
        return self._text

    def _so_far(self) -> Owned:
        return created("request_so_far", self._handle)
