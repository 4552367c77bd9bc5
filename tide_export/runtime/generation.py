"""What a generation gives back, and when one ends: shared by one sequence (`engine`) and several (`batch.generate`)."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from tide_export.runtime.stats import ExitStats

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: the new token ids; the stop token, if one came, is the last.
        stats: exits, layers run, seconds.
        finish_reason: "stop" (a stop token), "length" (max_new_tokens), "context" (the model's context is full).
    """

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason


def ending(token: int, stop: Container[int], made: int, most: int) -> FinishReason | None:
    """Why `token`, number `made` of at most `most`, is the last one; None where it is not, as far as these say."""
    if token in stop:
        return "stop"
    return "length" if made == most else None
