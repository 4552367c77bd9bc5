"""What a `GenerationConfig` means for one bundle: completed from its manifest and checked against it before any step.

All functions raise GenerationError with a sentence that names the option. An option that would change nothing is an
error too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.names import TOKENIZER_FILE
from tide_export.runtime.config import GenerationConfig, token_ids
from tide_export.runtime.decoding.audited import AuditedDecoder, Auditor
from tide_export.runtime.decoding.decoder import Decoder, OneByOne
from tide_export.runtime.decoding.lossless import DraftLimits, LosslessDecoder, default_drafting
from tide_export.runtime.decoding.processing import LogitsProcessing
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.generated_text import GeneratedText
from tide_export.runtime.grammar import KINDS, Grammar
from tide_export.runtime.sequence import NO_LIMIT, SequenceState
from tide_export.runtime.tokenizer import tokenizer_of
from tide_export.thresholds.resolve import resolve_thresholds
from tide_export.values import real_number, whole_number

EXIT_OPTIONS = ("threshold", "min_layers", "max_pending", "compaction_threshold")


@dataclass(frozen=True)
class Request:
    """A `GenerationConfig` resolved for one bundle.

    Attributes:
        thresholds: one per checkpoint, 2.0 where none may exit.
        max_pending: tokens that may be pending before a segment is forced to run; in lossless mode without limit,
            because the decoder says when to verify.
        compaction_threshold: see `GenerationConfig`.
        drafts: how far to draft; None outside lossless mode.
        stop: tokens that end a generation.
        grammar: that the text must follow; None: any text.
    """

    config: GenerationConfig
    thresholds: list[float]
    max_pending: int
    compaction_threshold: float
    drafts: DraftLimits | None
    stop: frozenset[int]
    grammar: Grammar | None


def resolve(bundle: Bundle, config: GenerationConfig, batched: bool, auto: AutoMode | None = None) -> Request:
    """Resolves `config` for a bundle.

    Args:
        batched: for a list of prompts.
        auto: what mode `auto` is; None: full depth.
    """
    manifest, config = bundle.manifest, without_auto(bundle, config, auto, batched)
    thresholds, drafts = _thresholds(manifest, config), _draft_limits(manifest, config)
    if drafts and manifest.kv_cache_strategy == PROPAGATE:
        raise GenerationError(
            f"mode 'lossless' needs an exact K/V cache, and bundle {bundle.path} propagates: export it with "
            "kv_cache_strategy exact"
        )
    for name, used in (("top_k", config.top_k > 0), ("top_p", config.top_p < 1), ("min_p", config.min_p > 0)):
        if used and config.temperature == 0:
            raise GenerationError(f"{name} is for a temperature above 0: without one the most likely token is taken")
    check_exits(bundle, config.mode, {name: getattr(config, name) for name in EXIT_OPTIONS}, batched)
    max_pending = manifest.max_pending if config.max_pending is None else config.max_pending
    stop = manifest.model.eos_token_ids if config.stop_token_ids is None else config.stop_token_ids
    if config.stop_token_ids:
        check_vocabulary(manifest, np.array(config.stop_token_ids), "stop_token_ids")
    for option in ("stop", "detokenize", *KINDS):
        if getattr(config, option) and TOKENIZER_FILE not in bundle.files:
            raise GenerationError(f"{option} needs a tokenizer, and bundle {bundle.path} holds no {TOKENIZER_FILE}")
    if config.logit_bias:
        check_vocabulary(manifest, np.array(list(dict(config.logit_bias))), "logit_bias")
    if config.logprobs is not None:
        whole_number("logprobs", config.logprobs, minimum=0, maximum=manifest.model.vocab_size)
    grammars = [Grammar(bundle, kind, text) for kind in KINDS if (text := getattr(config, kind)) is not None]
    if grammars:
        stop = (*stop, *manifest.model.eos_token_ids)
    return Request(
        config,
        thresholds,
        NO_LIMIT if drafts else max_pending,
        _compaction_threshold(manifest, config),
        drafts,
        frozenset(map(int, stop)),
        grammars[0] if grammars else None,
    )


def without_auto(
    bundle: Bundle, config: GenerationConfig, auto: AutoMode | None, batched: bool = True
) -> GenerationConfig:
    """`config` with the mode that `auto` is, its thresholds, and none of the options that this mode does not have.
    Which options are accepted does not depend on what was measured."""
    if config.mode != "auto":
        return config
    check_exits(bundle, "exit", {name: getattr(config, name) for name in EXIT_OPTIONS}, batched)
    if config.prompt_lookup is not None:
        raise GenerationError("prompt_lookup is for mode 'lossless', not 'auto': elsewhere nothing is drafted")
    if config.threshold is not None or config.min_layers is not None:
        return replace(config, mode="exit")
    if auto is None or auto.mode == "full":
        return replace(config, mode="full", max_pending=None, compaction_threshold=None)
    if auto.mode == "lossless":
        return replace(config, mode="lossless", compaction_threshold=None)
    return replace(config, mode="exit", threshold=auto.thresholds, min_layers=0)


def check_exits(bundle: Bundle, mode: str, options: Mapping[str, Any], batched: bool = False) -> None:
    """Refuses options that change nothing in this mode of this bundle.

    Args:
        options: by name, of EXIT_OPTIONS; None: not given.
        batched: they are for a list of prompts.
    """
    manifest = bundle.manifest
    for name in EXIT_OPTIONS:
        if options.get(name) is None:
            continue
        if name == "compaction_threshold" and not batched:
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


def is_list_of_prompts(ids: Any) -> bool:
    """Whether `ids` is several prompts: a list whose entries are lists or arrays, or an array of two dimensions."""
    if isinstance(ids, np.ndarray):
        return ids.ndim == 2
    return isinstance(ids, list | tuple) and any(isinstance(entry, list | tuple | np.ndarray) for entry in ids)


def check_prompt(manifest: Manifest, ids: Sequence[int] | np.ndarray, what: str = "the prompt") -> np.ndarray:
    """The prompt as int64 [S], every id inside the vocabulary."""
    prompt = token_ids(what, ids)
    if len(prompt) == 0:
        raise GenerationError(f"{what} is empty: give at least one token")
    check_vocabulary(manifest, prompt, what)
    context = manifest.model.context_length
    if context is not None and len(prompt) > context:
        raise GenerationError(f"{what} has {len(prompt)} tokens but the model's context holds {context}")
    return prompt.astype(np.int64)


def check_vocabulary(manifest: Manifest, ids: np.ndarray, what: str) -> None:
    """Raises GenerationError for a token id that the model does not have."""
    last = manifest.model.vocab_size - 1
    outside = ids[(ids < 0) | (ids > last)]
    if len(outside):
        raise GenerationError(f"{what} holds token id {outside[0]}, outside the vocabulary 0..{last}")


def check_thresholds(manifest: Manifest, thresholds: Sequence[float]) -> None:
    """Raises GenerationError unless there is one threshold per checkpoint and all are numbers."""
    if len(thresholds) != len(manifest.checkpoints):
        raise GenerationError(f"{len(thresholds)} thresholds for {len(manifest.checkpoints)} checkpoints")
    for value in thresholds:
        real_number("a threshold", value)


def single_seed(config: GenerationConfig) -> int | None:
    """The seed of one prompt."""
    if isinstance(config.seed, Sequence):
        return whole_number("seed", list(config.seed), minimum=0)  # raises
    return config.seed


def seeds(config: GenerationConfig, count: int) -> Sequence[int | None]:
    """One seed for each of `count` prompts."""
    if not isinstance(config.seed, Sequence):
        return [config.seed] * count
    if len(config.seed) != count:
        raise GenerationError(
            f"there are {len(config.seed)} seeds for {count} prompts: give one for each, or one for all"
        )
    return config.seed


def _thresholds(manifest: Manifest, config: GenerationConfig) -> list[float]:
    threshold = config.threshold
    if threshold is None:
        drafts = config.mode == "lossless"
        threshold = (manifest.drafting or default_drafting(manifest)).thresholds if drafts else manifest.thresholds
    # min_layers guards the quality of exits; drafts are verified.
    default = 0 if config.mode == "lossless" else manifest.min_layers
    min_layers = default if config.min_layers is None else config.min_layers
    return resolve_thresholds(manifest.checkpoints, threshold, min_layers, config.mode)


def _draft_limits(manifest: Manifest, config: GenerationConfig) -> DraftLimits | None:
    """How far to draft, as the config, else the bundle, says; None outside lossless mode."""
    if config.mode != "lossless":
        if config.prompt_lookup is not None:
            raise GenerationError(
                f"prompt_lookup is for mode 'lossless', not {config.mode!r}: elsewhere nothing is drafted"
            )
        return None
    drafting = manifest.drafting or default_drafting(manifest)
    limits = DraftLimits(drafting.max_drafts, drafting.prompt_lookup, drafting.draft_costs, drafting.verify_costs)
    if config.max_pending is not None:
        limits = limits._replace(max_drafts=config.max_pending)
    if config.prompt_lookup is not None:
        limits = limits._replace(prompt_lookup=config.prompt_lookup)
    return limits


def _compaction_threshold(manifest: Manifest, config: GenerationConfig) -> float:
    """In lossless mode all pending tokens are drafts, which have to go through every layer: the default there is 0."""
    default = 0.0 if config.mode == "lossless" else manifest.compaction_threshold
    return default if config.compaction_threshold is None else config.compaction_threshold


def text_of(bundle: Bundle, config: GenerationConfig, prompt: np.ndarray) -> GeneratedText | None:
    """The text after `prompt`; None where no option asks for it.

    Raises:
        BundleError: the tokenizer cannot be used.
    """
    if not (config.stop or config.detokenize):
        return None
    return GeneratedText(tokenizer_of(bundle), prompt.tolist(), config.stop)


def sampler_of(request: Request, prompt: np.ndarray) -> Sampler:
    """The sampler of a sequence that begins with `prompt`."""
    config, processing = request.config, None
    if (
        config.logits_processor is not None
        or config.repetition_penalty != 1
        or config.presence_penalty
        or config.frequency_penalty
        or config.logit_bias
        or request.grammar is not None
    ):
        processing = LogitsProcessing(
            prompt.tolist(),
            processor=config.logits_processor,
            repetition_penalty=config.repetition_penalty,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            logit_bias=dict(config.logit_bias),
            grammar=None if request.grammar is None else request.grammar.start(),
        )
    return Sampler(
        config.temperature,
        config.top_k,
        config.top_p,
        single_seed(config),
        min_p=config.min_p,
        processing=processing,
        logprobs=config.logprobs,
    )


def decoder_of(
    manifest: Manifest,
    sampler: Sampler,
    stop: frozenset[int],
    drafts: DraftLimits | None,
    state: SequenceState,
    auditor: Auditor | None = None,
) -> Decoder:
    """The decoder of an empty sequence; `drafts` are None outside lossless mode, `auditor` is for mode exit alone."""
    depths = (*manifest.checkpoints, manifest.model.num_layers)
    state.candidates = sampler.candidates
    if auditor is not None:
        return AuditedDecoder(state, sampler, depths, auditor)
    if drafts is None:
        return OneByOne(sampler, depths)
    return LosslessDecoder(state, sampler, depths, drafts, stop, manifest.model.context_length)
