"""What a caller asked `engine` for, checked and completed from the manifest before a step is run.

Numbers by themselves are `options`' affair; here is what depends on the bundle: its vocabulary, context, thresholds and
defaults. All raise GenerationError, in a sentence that names the option.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_export.bundle import Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.lookup import PromptLookup
from tide_export.runtime.lossless import LEAST_MATCH, LOOKUP, MAX_DRAFTS
from tide_export.runtime.options import whole_number
from tide_export.thresholds import resolve_thresholds


def waiting_limit(manifest: Manifest, mode: str, max_pending: int | None) -> int:
    """Tokens that may wait before a segment is forced to run, in lossless mode drafts."""
    if max_pending is not None:
        return whole_number("max_pending", max_pending, least=0)
    if mode != "lossless":
        return manifest.max_pending
    return MAX_DRAFTS if manifest.drafting is None else manifest.drafting.max_drafts


def check_lookup(mode: str, prompt_lookup: int | None) -> None:
    """Refuses lookups where nothing is drafted."""
    if prompt_lookup is not None and mode != "lossless":
        raise GenerationError(f"prompt_lookup is for mode 'lossless', not {mode!r}: elsewhere nothing is drafted")


def lookup_of(manifest: Manifest, most: int | None) -> PromptLookup:
    """An empty lookup as the caller, else the bundle, wants it."""
    drafting = manifest.drafting
    least_match = LEAST_MATCH if drafting is None else drafting.least_match
    if most is not None:
        return PromptLookup(whole_number("prompt_lookup", most, least=0), least_match)
    return PromptLookup(LOOKUP if drafting is None else drafting.lookup, least_match)


def thresholds_of(
    manifest: Manifest, mode: str, threshold: float | Sequence[float] | None, min_layers: int | None
) -> list[float]:
    """One threshold per checkpoint, 2.0 where none may exit."""
    drafting = manifest.drafting if mode == "lossless" else None
    own = manifest.thresholds if drafting is None else drafting.thresholds
    given: float | Sequence[float] = own if threshold is None else threshold
    if isinstance(given, np.generic | np.ndarray):
        given = given.tolist()
    if not isinstance(given, int | float | list | tuple):
        raise GenerationError(f"threshold must be a number or a list of numbers, not {given!r}")
    # What min_layers guards is the quality of exits; drafts are verified.
    default = 0 if mode == "lossless" else manifest.min_layers
    least = default if min_layers is None else whole_number("min_layers", min_layers, least=0)
    return resolve_thresholds(manifest.checkpoints, given, least, mode)


def is_list_of_prompts(ids: Any) -> bool:
    """Whether `ids` is several prompts: a list whose entries are lists or arrays, or an array of two dimensions."""
    if isinstance(ids, np.ndarray):
        return ids.ndim == 2
    return isinstance(ids, list | tuple) and any(isinstance(entry, list | tuple | np.ndarray) for entry in ids)


def seeds_of(seed: Any, count: int) -> list[Any]:
    """One seed per prompt; `Sampler` checks them."""
    if not isinstance(seed, list | tuple | np.ndarray):
        return [seed] * count
    if len(seed) != count:
        raise GenerationError(f"there are {len(seed)} seeds for {count} prompts: give one for each, or one for all")
    return list(seed)


def stops_of(manifest: Manifest, stop_token_ids: Sequence[int] | None) -> frozenset[int]:
    """The tokens that end a generation: the caller's, else the model's own."""
    stop = manifest.model.eos_token_ids if stop_token_ids is None else _token_ids("stop_token_ids", stop_token_ids)
    return frozenset(int(token) for token in stop)


def prompt_of(manifest: Manifest, ids: Sequence[int] | np.ndarray, what: str = "the prompt") -> np.ndarray:
    """The prompt as int64 [S], every id inside the vocabulary."""
    prompt = _token_ids(what, ids)
    if len(prompt) == 0:
        raise GenerationError(f"{what} is empty: give at least one token")
    vocabulary, context = manifest.model.vocab_size, manifest.model.context_length
    outside = prompt[(prompt < 0) | (prompt >= vocabulary)]
    if len(outside):
        raise GenerationError(f"{what} holds token id {outside[0]}, outside the vocabulary 0..{vocabulary - 1}")
    if context is not None and len(prompt) > context:
        raise GenerationError(f"{what} has {len(prompt)} tokens but the model's context holds {context}")
    return prompt.astype(np.int64)


def _token_ids(what: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError):
        array = None
    if array is not None and array.shape == (0,):
        return np.zeros(0, np.int64)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise GenerationError(f"{what} must be a flat list of whole numbers (token ids)")
    return array
