"""What a caller holds of a request: its tokens as they come, its result, and the means to cancel it."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Iterator
from ctypes import c_int, c_int64
from typing import Protocol

from tide_export.runtime.generation import (
    FinishReason,
    Generation,
    Snapshot,
    TokenLogprobs,
    finished,
    read_prompt_logprobs,
    take_snapshot,
)
from tide_export.runtime.hooks import Hooks
from tide_export.runtime.native import ENDED, Owned, created, error_of, library
from tide_export.runtime.stats import ExitStats
from tide_export.runtime.tokenizer import LateText
from tide_export.runtime.watch import Watch

TOKENS_READ = 64  # in one call
WAIT_SECONDS = 0.1  # after which a waiting thread runs signal handlers


class Driver(Protocol):
    """What a handle needs of its scheduler."""

    def drive(self) -> bool: ...

    def watch(self) -> Watch: ...

    def forget(self, request: Owned) -> None: ...


class RequestHandle(Iterator[int], AsyncIterator[int]):
    """A submitted request. Iterating gives its tokens as they are made; `async for` does too.

    Any thread may use it, one at a time.
    """

    def __init__(
        self,
        scheduler: Driver,
        handle: Owned,
        hooks: Hooks | None,
        late: LateText | None,
        logprobs: bool,
        prompt_logprobs: bool,
    ) -> None:
        """Takes a tide_request; the arguments are those of `TokenStream`."""
        self._scheduler, self._handle, self._hooks, self._late = scheduler, handle, hooks, late
        self._with_logprobs, self._with_prompt_logprobs = logprobs, prompt_logprobs
        self._tokens: list[int] = []
        self._returned = 0
        self._ended = False
        self._error: BaseException | None = None
        self._ids, self._status = (c_int64 * TOKENS_READ)(), c_int()

    @property
    def tokens(self) -> list[int]:
        """Made so far."""
        self._read()
        return self._tokens

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it has not."""
        self._read()
        return self._error

    @property
    def mode(self) -> str:
        """That it is decoded in; where none was named what mode `auto` is for the scheduler's slots."""
        mode: bytes = library().tide_request_mode(self._handle)
        return mode.decode()

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until it has ended, and where it failed."""
        return self._snapshot().finish_reason

    @property
    def text(self) -> str | None:
        """Of the tokens made so far, without what may become a stop string; None: neither `stop` nor `detokenize` asks
        for it."""
        if self._late is None:
            return self._snapshot().text
        self._read()
        return self._late.of(self._tokens, self._ended)

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of the tokens made so far; None: they were not asked for."""
        return self._snapshot().logprobs if self._with_logprobs else None

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Of the prompt's tokens, once there is a token; None: they were not asked for."""
        return read_prompt_logprobs(self._so_far()) if self._with_prompt_logprobs else None

    @property
    def stats(self) -> ExitStats:
        """Of the tokens made so far."""
        return self._snapshot().stats

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose K/V came from the scheduler's prefix cache."""
        cached: int = library().tide_request_cached_tokens(self._handle)
        return cached

    def cancel(self) -> None:
        """Ends the request before the next step; its tokens so far stay. Does nothing after its end."""
        library().tide_request_cancel(self._handle)

    def result(self) -> Generation:
        """Waits for the end.

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
        """The next token, without waiting; None: there is none yet, or no more."""
        if self._returned == len(self._tokens):
            self._read()
            if self._returned == len(self._tokens):
                return None
        self._returned += 1
        return self._tokens[self._returned - 1]

    def _end(self, otherwise: Exception) -> BaseException:
        return otherwise if self._error is None else self._error

    def _read(self) -> None:
        """Takes over the tokens that were made since the last call, and the end."""
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

    def _snapshot(self) -> Snapshot:
        return take_snapshot(self._so_far())

    def _so_far(self) -> Owned:
        return created("request_so_far", self._handle)
