"""What a caller holds of a request: its tokens as they come, its result, and the means to cancel it."""

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from tide_export.errors import GenerationError
from tide_export.runtime.decoding.generation import FinishReason, Generation
from tide_export.runtime.decoding.sampling import TokenLogprobs
from tide_export.runtime.decoding.stats import ExitStats

if TYPE_CHECKING:
    from tide_export.runtime.scheduling.job import Job

END = None  # after the last tokens


class RequestHandle(Iterator[int], AsyncIterator[int]):
    """A submitted request. Iterating gives its tokens as they are made; `async for` does too.

    Any thread may use it, one at a time.

    Attributes:
        tokens: made so far.
        error: why it failed; None while it has not.
    """

    def __init__(self, job: "Job", drive: Callable[[], bool]) -> None:
        """`drive` does a step, or returns False where a thread of the scheduler does them."""
        self._job, self._drive = job, drive
        self._queue = queue.SimpleQueue[list[int] | None]()
        self._ready = deque[int]()
        self._listener: Callable[[], Any] | None = None
        self._ended = False
        self.tokens: list[int] = []
        self.error: GenerationError | None = None

    @property
    def mode(self) -> str:
        """That it is decoded in; where none was named what mode `auto` is for the scheduler's slots."""
        return self._job.request.config.mode

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until it has ended."""
        return self._job.progress.finish_reason

    @property
    def text(self) -> str | None:
        """Of the tokens made so far, without what may become a stop string; None: neither `stop` nor `detokenize` asks
        for it."""
        return self._job.progress.text

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of the tokens made so far; None: they were not asked for."""
        return self._job.progress.logprobs

    @property
    def stats(self) -> ExitStats:
        """Of the tokens made so far."""
        return self._job.progress.stats

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose K/V came from the scheduler's prefix cache."""
        return self._job.progress.cached_tokens

    def cancel(self) -> None:
        """Ends the request before the next step; its tokens so far stay. Does nothing after its end."""
        self._job.cancelled = True

    def result(self) -> Generation:
        """Waits for the end.

        Raises:
            GenerationError: the request failed.
        """
        for _ in self:
            pass
        return self._job.progress.finished()

    def __next__(self) -> int:
        while not self._ready:
            if self._ended:
                if self.error is not None:
                    raise self.error
                raise StopIteration
            self._wait()
        return self._ready.popleft()

    async def __anext__(self) -> int:
        while not self._ready:
            if self._ended:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            await self._wait_async()
        return self._ready.popleft()

    def _wait(self) -> None:
        while True:
            try:
                self._take(self._queue.get_nowait())
                return
            except queue.Empty:
                if not self._drive():
                    self._take(self._queue.get())
                    return

    async def _wait_async(self) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self._listener = lambda: loop.call_soon_threadsafe(done.set)
        try:
            self._take(self._queue.get_nowait())
            return
        except queue.Empty:
            await done.wait()
        self._take(self._queue.get_nowait())

    def _take(self, tokens: list[int] | None) -> None:
        if tokens is END:
            self._ended = True
        else:
            self._ready += tokens

    def put(self, tokens: list[int] | None) -> None:
        """Called by the scheduler: new tokens, or the end."""
        if tokens:
            self.tokens += tokens
        self._queue.put(tokens)
        listener = self._listener
        if listener is not None:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed: nobody waits any more
                listener()
