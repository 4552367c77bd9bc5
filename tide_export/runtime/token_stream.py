"""Reads the tokens of one generation as they are generated."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int64, c_size_t

from tide_export.runtime.generation import (
    FinishReason,
    Generation,
    TokenLogprobs,
    finished,
    read_finish_reason,
    read_logprobs,
    read_stats,
    read_text,
)
from tide_export.runtime.hooks import Hooks
from tide_export.runtime.native import ENDED, Owned, created, error_of, library
from tide_export.runtime.stats import ExitStats
from tide_export.runtime.tokenizer import LateText

TOKENS_READ = 64  # at most, in one call
READ = c_int64 * TOKENS_READ


class TokenStream(Iterator[int]):
    """Yields the tokens of one generation as they are generated.

    An exception that ends a read (KeyboardInterrupt, a time-out from a signal handler, GenerationError) loses no token:
    the next read generates the same one. One thread at a time may use it: while one reads, others get GenerationError.

    Attributes:
        tokens: the tokens returned so far.
    """

    def __init__(
        self,
        handle: Owned,
        hooks: Hooks | None,
        late: LateText | None,
        mode: str = "full",
        logprobs: bool = False,
        prompt_logprobs: bool = False,
    ) -> None:
        """Wraps a tide_token_stream.

        Args:
            late: decodes the text if the library does not.
            mode: the mode of decoding, if states were requested.
            logprobs, prompt_logprobs: whether they were requested.
        """
        self.tokens: list[int] = []
        self._handle, self._hooks, self._late, self._mode = handle, hooks, late, mode
        self._with_logprobs, self._with_prompt_logprobs = logprobs, prompt_logprobs
        self._made: list[int] = []  # generated so far; `tokens` may lag
        self._ended = False
        self._step = library().tide_token_stream_step

    @property
    def stats(self) -> ExitStats:
        """Statistics of the tokens so far, in lossless mode a few more than were returned."""
        return read_stats(self._so_far())

    @property
    def text(self) -> str | None:
        """Text of the tokens so far, without a possible start of a stop string.

        None: neither `stop` nor `detokenize` was given.
        """
        if self._late is not None:
            return self._late.of(self._made, self._ended)
        return read_text(self._so_far())

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the tokens returned so far; None: not requested."""
        return read_logprobs(self._so_far())[: len(self.tokens)] if self._with_logprobs else None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None until then."""
        return read_finish_reason(self._so_far()) if self._ended and len(self.tokens) == len(self._made) else None

    def __next__(self) -> int:
        while len(self.tokens) == len(self._made):
            if self._ended:
                raise StopIteration
            self._make_tokens()
        read = len(self.tokens)
        self.tokens[read:] = self._made[read : read + 1]  # not append: an exception after a call would lose the token
        return self._made[read]

    def finish(self) -> Generation:
        """Generates the remaining tokens and returns the whole generation."""
        while not self._ended:
            self._make_tokens()
        self.tokens += self._made[len(self.tokens) :]
        wanted = self._with_logprobs, self._with_prompt_logprobs
        return finished(self._so_far(), self._mode, self.text, *wanted)

    def _make_tokens(self) -> None:
        made, ids, count = len(self._made), READ(), c_size_t()
        status = self._step(self._handle, made, ids, TOKENS_READ, ctypes.byref(count))
        if status > ENDED:
            raise error_of(status) if self._hooks is None else self._hooks.error_of(status)
        self._made[made : made + count.value] = ids[: count.value]
        self._ended = status == ENDED

    def _so_far(self) -> Owned:
        return created("token_stream_so_far", self._handle)
