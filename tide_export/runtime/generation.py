"""Reads the result of a generation from the library."""

import ctypes
import json
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_size_t
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tide_export.runtime.native import Logprob, Owned, library, text_at
from tide_export.runtime.stats import ExitStats

FinishReason = Literal["stop", "length", "context", "cancelled", "timeout"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities from the model's unchanged logits.

    Attributes:
        logprob: the token's.
        top: (id, log-probability) of the most likely tokens, best first, then lowest id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: the new token ids; a stop token is included, as the last.
        stats: exits, layers run, seconds.
        finish_reason: "stop" (a stop token or string), "length" (max_new_tokens), "context" (the model's context is
            full); of a scheduler's request also "cancelled" and "timeout".
        logprobs: of each token; None unless `GenerationConfig.logprobs` is set.
        text: the text of the tokens up to a stop string; None unless `stop` or `detokenize` is set.
        states: the hidden states that the model's head reads, float32; None unless `GenerationConfig.states` is set.
            Mode full: of each token that was run, which the last new one is not, [prompt + tokens - 1, D]. Mode exit:
            of each new token at its exit, [tokens, D].
        prompt_logprobs: of each token of the prompt, None for the first; None unless
            `GenerationConfig.prompt_logprobs` is set.
    """

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    text: str | None = None
    states: NDArray[np.float32] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def read_stats(handle: Owned) -> ExitStats:
    """Reads the statistics of a tide_generation."""
    return ExitStats.from_dict(json.loads(library().tide_generation_stats(handle)))


def read_finish_reason(handle: Owned) -> FinishReason | None:
    """Reads why a tide_generation ended; None: it has not."""
    reason: bytes | None = library().tide_generation_finish_reason(handle)
    return cast(FinishReason, reason.decode()) if reason else None


def read_text(handle: Owned) -> str | None:
    """Reads the text of a tide_generation; None: the library decodes none."""
    count = c_size_t()
    address = library().tide_generation_text(handle, ctypes.byref(count))
    return None if address is None else text_at(address, count.value)


def read_logprobs(handle: Owned) -> list[TokenLogprobs]:
    """Reads the log-probabilities of the tokens of a tide_generation."""
    return _logprobs(library().tide_generation_logprobs, handle)


def finished(handle: Owned, mode: str, text: str | None, logprobs: bool, prompt_logprobs: bool) -> Generation:
    """Reads all of a tide_generation that has ended.

    Args:
        mode: the mode of decoding.
        text: the text of its tokens.
        logprobs, prompt_logprobs: whether they were requested.
    """
    count, stats, reason, states = c_size_t(), read_stats(handle), read_finish_reason(handle), None
    address = library().tide_generation_tokens(handle, ctypes.byref(count))
    tokens = list((c_int64 * count.value).from_address(address)) if count.value else []
    address = library().tide_generation_states(handle, ctypes.byref(count))
    if count.value:
        rows = len(tokens) if mode == "exit" else stats.prompt_tokens + len(tokens) - 1
        states = np.array((c_float * count.value).from_address(address), np.float32).reshape(rows, -1)
    assert reason is not None
    return Generation(
        tokens,
        stats,
        reason,
        read_logprobs(handle) if logprobs else None,
        text,
        states,
        read_prompt_logprobs(handle) if prompt_logprobs else None,
    )


def read_prompt_logprobs(handle: Owned) -> list[TokenLogprobs | None]:
    """Reads the prompt's log-probabilities from a tide_generation that has at least one token."""
    return [None, *_logprobs(library().tide_generation_prompt_logprobs, handle)]


def _logprobs(function: Any, handle: Owned) -> list[TokenLogprobs]:
    """Calls `function` for token 0, 1, ... until it has no entries; each token's own entry is the first."""
    count, logprobs = c_size_t(), list[TokenLogprobs]()
    while True:
        entries = function(handle, len(logprobs), ctypes.byref(count))
        if not count.value:
            return logprobs
        logprobs.append(token_logprobs(entries[: count.value]))


def token_logprobs(entries: Sequence[Logprob]) -> TokenLogprobs:
    """Returns the log-probabilities of a token, whose own entry is the first."""
    (_, chosen), *top = ((entry.id, entry.logprob) for entry in entries)
    return TokenLogprobs(chosen, tuple(top))
