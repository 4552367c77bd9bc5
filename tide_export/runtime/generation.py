"""The result of a generation, and how it is read from the library."""

import ctypes
import json
from ctypes import c_float, c_int64, c_size_t
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
        states: what the model's head reads of each token that was run, which the last new one is not, float32
            [prompt + tokens - 1, D], where `GenerationConfig.states` asked for them.
    """

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    text: str | None = None
    states: NDArray[np.float32] | None = None


class Snapshot(NamedTuple):
    """A generation as far as it has come."""

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs]
    text: str | None
    states: NDArray[np.float32] | None


def take_snapshot(handle: Owned) -> Snapshot:
    """Reads a tide_generation."""
    functions, count = library(), c_size_t()
    at = functions.tide_generation_tokens(handle, ctypes.byref(count))
    tokens = list((c_int64 * count.value).from_address(at)) if count.value else []
    stats = ExitStats.from_dict(json.loads(functions.tide_generation_stats(handle)))
    reason = functions.tide_generation_finish_reason(handle)
    address = functions.tide_generation_text(handle, ctypes.byref(count))
    text = None if address is None else text_at(address, count.value)
    logprobs = []
    for number in range(len(tokens)):
        entries = functions.tide_generation_logprobs(handle, number, ctypes.byref(count))
        if not count.value:
            break
        (_, own), *top = ((entry.id, entry.logprob) for entry in entries[: count.value])
        logprobs.append(TokenLogprobs(own, tuple(top)))
    at, states = functions.tide_generation_states(handle, ctypes.byref(count)), None
    if count.value:
        rows = stats.prompt_tokens + len(tokens) - 1
        states = np.array((c_float * count.value).from_address(at), np.float32).reshape(rows, -1)
    return Snapshot(tokens, stats, reason.decode() if reason else None, logprobs, text, states)
