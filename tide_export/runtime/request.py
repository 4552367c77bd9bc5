"""Converts a prompt and a `GenerationConfig` to the library's arguments: ids, JSON options, hooks."""

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig, token_ids
from tide_export.runtime.grammar import KINDS, grammar_of
from tide_export.runtime.hooks import Hooks
from tide_export.runtime.tokenizer import tokenizer_of

MAX_INT64 = 2**63 - 1
# Options that are not the library's: hooks stand for them, or the text is made here.
OWN = {"logits_processor", *KINDS, "json_whitespace", "detokenize", "special_tokens"}


def options_json(bundle: Bundle, config: GenerationConfig, drafting: Drafting | None = None) -> bytes:
    """Returns the options of a request as the JSON that tide.h takes.

    Args:
        drafting: replaces the bundle's drafting in lossless mode.

    Raises:
        GenerationError: an option needs a tokenizer that the bundle does not have.
    """
    options: dict[str, Any] = {
        field.name: value
        for field in fields(config)
        if field.name not in OWN and (value := getattr(config, field.name)) != field.default
    }
    for option in ("stop", "detokenize", *KINDS):
        if getattr(config, option) and TOKENIZER_FILE not in bundle.files:
            raise GenerationError(f"{option} needs a tokenizer, and bundle {bundle.path} holds no {TOKENIZER_FILE}")
    if config.logit_bias:
        options["logit_bias"] = {str(token): bias for token, bias in dict(config.logit_bias).items()}
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
    grammar = None if kind is None else grammar_of(bundle, kind, getattr(config, kind), config.json_whitespace).start()
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
