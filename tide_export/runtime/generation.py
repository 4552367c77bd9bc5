"""The result of a generation, and how it is read from the library."""

import ctypes
import json
from ctypes import c_float, c_int64, c_size_t
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_export.runtime.native import Owned, library, text_at
from tide_export.runtime.stats import ExitStats

FinishReason = Literal["stop", "length", "context", "cancelled", "timeout"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities by the model's logits, before anything changes them."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...]  # the most likely tokens and theirs, best first; of equal ones the lowest id


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: the new token ids; the stop token, if one came, is the last.
        stats: exits, layers run, seconds.
        finish_reason: "stop" (a stop token or string), "length" (max_new_tokens), "context" (the model's context is
            full); of a scheduler's request also "cancelled" and "timeout".
        logprobs: of each token, where `GenerationConfig.logprobs` asked for them.
        text: of the tokens, up to a stop string, where `stop` or `detokenize` asked for it.
        states: what the model's head reads, float32, where `GenerationConfig.states` asked for it. Mode full: of each
            token that was run, which the last new one is not, [prompt + tokens - 1, D]. Mode exit: for each new token,
            at its exit, [tokens, D].
        prompt_logprobs: of each token of the prompt, where `GenerationConfig.prompt_logprobs` asked for them; nothing
            comes before the first, which has None.
    """

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    text: str | None = None
    states: NDArray[np.float32] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Snapshot(NamedTuple):
    """A generation as far as it has come."""

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs]
    text: str | None


def take_snapshot(handle: Owned) -> Snapshot:
    """Reads a tide_generation, but not what may be large."""
    functions, count = library(), c_size_t()
    at = functions.tide_generation_tokens(handle, ctypes.byref(count))
    tokens = list((c_int64 * count.value).from_address(at)) if count.value else []
    stats = ExitStats.from_dict(json.loads(functions.tide_generation_stats(handle)))
    reason = functions.tide_generation_finish_reason(handle)
    address = functions.tide_generation_text(handle, ctypes.byref(count))
    text = None if address is None else text_at(address, count.value)
    logprobs = _logprobs(functions.tide_generation_logprobs, handle)
    return Snapshot(tokens, stats, reason.decode() if reason else None, logprobs, text)


def finished(handle: Owned, mode: str, text: str | None, logprobs: bool, prompt_logprobs: bool) -> Generation:
    """Reads all of a tide_generation that has ended.

    Args:
        mode: that it was made in.
        text: of its tokens.
        logprobs, prompt_logprobs: whether they were asked for.
    """
    made, count, states = take_snapshot(handle), c_size_t(), None
    at = library().tide_generation_states(handle, ctypes.byref(count))
    if count.value:
        rows = len(made.tokens) if mode == "exit" else made.stats.prompt_tokens + len(made.tokens) - 1
        states = np.array((c_float * count.value).from_address(at), np.float32).reshape(rows, -1)
    assert made.finish_reason is not None
    return Generation(
        made.tokens,
        made.stats,
        made.finish_reason,
        made.logprobs if logprobs else None,
        text,
        states,
        read_prompt_logprobs(handle) if prompt_logprobs else None,
    )


def read_prompt_logprobs(handle: Owned) -> list[TokenLogprobs | None]:
    """Reads those of a tide_generation that has made a token."""
    return [None, *_logprobs(library().tide_generation_prompt_logprobs, handle)]


def _logprobs(function: Any, handle: Owned) -> list[TokenLogprobs]:
    """Calls a function that gives those of the token of a number, from 0 on."""
    count, found = c_size_t(), list[TokenLogprobs]()
    while True:
        entries = function(handle, len(found), ctypes.byref(count))
        if not count.value:
            return found
        (_, own), *top = ((entry.id, entry.logprob) for entry in entries[: count.value])
        found.append(TokenLogprobs(own, tuple(top)))
