"""Prompts for the tiny Llama, and what two engines' generations from them must have in common."""

from collections.abc import Sequence
from typing import Any

from judge import TEXT

from tide_export.runtime.engine import Engine
from tide_export.runtime.generation import Generation

PROMPTS = [[7], [5, 9], TEXT, TEXT[3:20], [11] * 9]  # one is longer than the networks take in a run
NEW_TOKENS = 24
LOSSLESS = {"mode": "lossless", "stop_token_ids": []}


def facts(one: Generation) -> dict[str, Any]:
    """All but seconds and log-probabilities."""
    stats = {name: value for name, value in one.stats.as_dict().items() if "second" not in name}
    return {"tokens": one.tokens, "reason": one.finish_reason, **stats}


def exits(one: Generation) -> tuple[list[int], str, list[int]]:
    """What does not depend on the other sequences of a batch, unless drafts are verified."""
    return one.tokens, one.finish_reason, one.stats.exit_layer


def tokens_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [one.tokens for one in generations]


def alone(engine: Engine, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Generation]:
    """Each prompt by itself; of several seeds each has its own."""
    given = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": []} | options
    seeds = given.pop("seed", None)
    each = seeds if isinstance(seeds, list) else [seeds] * len(prompts)
    return [engine.generate(prompt, seed=seed, **given) for prompt, seed in zip(prompts, each, strict=True)]


def together(engine: Engine, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Generation]:
    return engine.generate(list(prompts), **{"max_new_tokens": NEW_TOKENS, "stop_token_ids": []} | options)
