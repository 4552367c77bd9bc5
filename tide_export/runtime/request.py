"""What a caller asked `engine` for, checked and completed from the manifest before a step is run.

Numbers by themselves are `options`' affair; here is what depends on the bundle: its vocabulary, context, thresholds and
defaults. All raise GenerationError, in a sentence that names the option. An option that could change nothing is refused
too, rather than that someone believes it did.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.bundle.store import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.decoding.lossless import DraftLimits
from tide_export.runtime.options import real_number, whole_number
from tide_export.thresholds.resolve import resolve_thresholds

EXITS = ("threshold", "min_layers", "max_pending", "compaction_threshold")  # options of who leaves, and who waits


def check_exits(bundle: Bundle, mode: str, options: Mapping[str, Any], several: bool = False) -> None:
    """Refuses options that change nothing in this mode, of this bundle, for one prompt.

    Args:
        options: by name, of EXITS; None is not given.
        several: there is a list of prompts.
    """
    manifest = bundle.manifest
    for name in EXITS:
        if options.get(name) is None:
            continue
        if name == "compaction_threshold" and not several:
            raise GenerationError(f"{name} is for a list of prompts: one prompt has nothing to be kept apart from")
        if mode == "full":
            raise GenerationError(f"{name} is for modes 'exit' and 'lossless', not 'full', where no token leaves early")
        if not manifest.checkpoints:
            raise GenerationError(
                f"{name} is for checkpoints, and bundle {bundle.path} has none: no token leaves early"
            )
        if name in ("max_pending", "compaction_threshold") and manifest.kv_cache_strategy == PROPAGATE:
            raise GenerationError(
                f"{name} is for an exact K/V cache: bundle {bundle.path} propagates, so that nothing waits"
            )


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuses a choice among tokens where none is drawn; the values are checked already."""
    for name, given in (("top_k", top_k > 0), ("top_p", top_p < 1)):
        if given and temperature == 0:
            raise GenerationError(f"{name} is for a temperature above 0: without one the most likely token is taken")


def waiting_limit(manifest: Manifest, max_pending: int | None) -> int:
    """Tokens that may wait before a segment is forced to run, outside lossless mode."""
    return manifest.max_pending if max_pending is None else whole_number("max_pending", max_pending, least=0)


def draft_limits(
    manifest: Manifest, mode: str, max_pending: int | None, prompt_lookup: int | None
) -> DraftLimits | None:
    """How to draft, as the caller, else the bundle, wants it; None outside lossless mode."""
    if mode != "lossless":
        if prompt_lookup is not None:
            raise GenerationError(f"prompt_lookup is for mode 'lossless', not {mode!r}: elsewhere nothing is drafted")
        return None
    own, limits = manifest.drafting, DraftLimits()
    if own is not None:
        limits = DraftLimits(own.max_drafts, own.prompt_lookup, own.min_match)
    if max_pending is not None:
        limits = limits._replace(max_drafts=whole_number("max_pending", max_pending, least=0))
    if prompt_lookup is not None:
        limits = limits._replace(prompt_lookup=whole_number("prompt_lookup", prompt_lookup, least=0))
    return limits


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


def share_of(manifest: Manifest, given: float | None, lossless: bool, greedy: bool) -> float:
    """The compaction threshold of a list of prompts.

    In lossless mode what waits are drafts, all of which have to go through every layer: None means 0 there, not the
    bundle's. But where tokens are drawn, when a sequence is verified decides what is drawn: each goes by itself.
    """
    share = manifest.compaction_threshold if given is None else real_number("compaction_threshold", given)
    if not 0 <= share <= 1:
        raise GenerationError(f"compaction_threshold must lie in [0, 1], not {share!r}")
    if not lossless:
        return share
    if greedy:
        return 0.0 if given is None else share
    if given is not None and share < 1:
        raise GenerationError(
            "compaction_threshold is 1 in mode 'lossless' with a temperature: each sequence is verified by itself, so "
            "that it draws what it would draw alone"
        )
    return 1.0


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
