"""Converts a prompt and a `GenerationConfig` to the library's arguments: ids, JSON options, hooks."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig, token_ids
from tide_export.runtime.grammar import KINDS, Grammar
from tide_export.runtime.hooks import Hooks
from tide_export.runtime.tokenizer import tokenizer_of

MAX_INT64 = 2**63 - 1
# Options that the library takes unchanged.
PLAIN = (
    *("mode", "threshold", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "stop_token_ids", "compaction_threshold", "adapter", "cache_salt", "states"),
)
WHOLE = (
    *("max_new_tokens", "min_layers", "max_pending", "prompt_lookup", "drafter", "top_k", "logprobs"),
    "prompt_logprobs",
)
DEFAULTS = GenerationConfig()


def options_json(bundle: Bundle, config: GenerationConfig, drafting: Drafting | None = None) -> bytes:
    """Returns the options of a request as the JSON that tide.h takes.

    Args:
        drafting: replaces the bundle's drafting in lossless mode.

    Raises:
        GenerationError: an option needs a tokenizer that the bundle does not have; or a seed is too large.
    """
    options: dict[str, Any] = {name: getattr(config, name) for name in PLAIN}
    options |= {name: min(value, MAX_INT64) for name in WHOLE if (value := getattr(config, name)) is not None}
    options = {name: value for name, value in options.items() if value != getattr(DEFAULTS, name)}
    for option in ("stop", "detokenize", *KINDS):
        if getattr(config, option) and TOKENIZER_FILE not in bundle.files:
            raise GenerationError(f"{option} needs a tokenizer, and bundle {bundle.path} holds no {TOKENIZER_FILE}")
    if config.seed is not None:
        options["seed"] = config.seed
        seeds = [config.seed] if isinstance(config.seed, int) else config.seed
        for seed in seeds:
            if seed > MAX_INT64:
                raise GenerationError(f"seed must be a whole number from 0 to {MAX_INT64}, not {seed}")
    if config.logit_bias:
        options["logit_bias"] = {str(token): bias for token, bias in dict(config.logit_bias).items()}
    if config.stop:
        options["stop"] = config.stop
    if _grammar_kind(config) and config.stop_token_ids is not None:
        ends = bundle.manifest.model.eos_token_ids
        options["stop_token_ids"] = sorted({*config.stop_token_ids, *ends})
    if drafting is not None:
        names = (
            "thresholds",
            "max_drafts",
            "prompt_lookup",
            "draft_costs",
            "verify_costs",
            "drafter_cost",
            "max_learned",
        )
        options["drafting"] = {name: value for name in names if (value := getattr(drafting, name)) is not None}
    return json.dumps(options).encode()


def hooks_of(bundle: Bundle, config: GenerationConfig, prompt: np.ndarray) -> Hooks | None:
    """Creates the hooks of a request; None if it needs none.

    Raises:
        GenerationError: a grammar cannot be compiled or used.
        BundleError: the tokenizer cannot be used.
    """
    kind = _grammar_kind(config)
    if config.logits_processor is None and kind is None and not config.stop:
        return None
    grammar = None if kind is None else Grammar(bundle, kind, getattr(config, kind), config.json_whitespace).start()
    decode = partial(tokenizer_of(bundle).decode, shown=config.special_tokens) if config.stop else None
    return Hooks(len(prompt), config.logits_processor, grammar, decode)


def _grammar_kind(config: GenerationConfig) -> str | None:
    return next((kind for kind in KINDS if getattr(config, kind) is not None), None)


def prompt_ids(ids: Sequence[int] | np.ndarray, what: str = "the prompt") -> np.ndarray:
    """Returns a prompt as int64 [S]; the library checks it against the bundle.

    Raises:
        GenerationError: it is not a flat list of whole numbers, or holds one of more than 64 bits.
    """
    prompt = token_ids(what, ids)
    if prompt.dtype.kind == "u" and len(prompt) and prompt.max() > MAX_INT64:
        raise GenerationError(f"{what} holds token id {prompt.max()}, outside the vocabulary")
    return np.ascontiguousarray(prompt, np.int64)


def is_list_of_prompts(ids: Any) -> bool:
    """Whether `ids` is several prompts: a list with lists or arrays in it, or a 2-D array."""
    if isinstance(ids, np.ndarray):
        return ids.ndim == 2
    return isinstance(ids, list | tuple) and any(isinstance(entry, list | tuple | np.ndarray) for entry in ids)
