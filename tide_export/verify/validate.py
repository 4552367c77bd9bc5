"""`tide-export validate`: does the bundle say what HuggingFace and TIDE's rule say, token for token, on real text?

Loads the bundle and the model it was made from, cuts prompts of many lengths from a dataset, and lets `parity` compare
full depth and lossless mode with HuggingFace and every threshold with the oracle. Then `verify.batch_parity` decodes a
few of them in one batch, which must give the same tokens. The report's `holds` is the command's exit code.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide_export.bundle.manifest import EXACT
from tide_export.bundle.store import Bundle, open_bundle
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.errors import BundleError, ConfigError, ProviderError
from tide_export.formatting import percent, table
from tide_export.model.source import SourceModel, load_model
from tide_export.names import ROUTERS_FILE
from tide_export.progress import stage
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.decoding.stats import LOOKUP_DRAFT
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.onnxruntime.segments import open_segments
from tide_export.runtime.request import check_exits
from tide_export.runtime.tensorrt.plugins import NONE
from tide_export.thresholds.resolve import resolve_thresholds
from tide_export.verify.batch_parity import Together, check_together
from tide_export.verify.parity import TOLERANCES, Check, Tolerance, check_exit, check_full, check_lossless
from tide_export.verify.quantized import FLOAT32_PREFIX, graph_engines, restore

logger = logging.getLogger("tide_export")
THRESHOLDS = (0.3, 0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True)
class ValidationReport:
    """All checks of one bundle; `holds` when every one of them does."""

    bundle: str
    model: str
    dataset: str
    prompt_lengths: list[int]
    new_tokens: int
    max_pending: int
    checks: list[Check]
    together: list[Together]
    weight_error: float | None = None  # of quantized weights: root of their squared error over the squared weights

    @property
    def holds(self) -> bool:
        compared = bool(self.checks) and all(check.holds for check in self.checks)
        return compared and all(together.holds for together in self.together)

    def as_dict(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "model": self.model,
            "dataset": self.dataset,
            "prompt_lengths": self.prompt_lengths,
            "new_tokens": self.new_tokens,
            "max_pending": self.max_pending,
            "forgiven_gap": max(check.tolerance.forgiven_gap for check in self.checks) if self.checks else None,
            "weight_error": self.weight_error,
            "holds": self.holds,
            "checks": [check.as_dict() for check in self.checks],
            "together": [together.as_dict() for together in self.together],
        }

    def render(self) -> str:
        """The table the command prints."""
        layers = sorted({layer for check in self.checks for layer in check.exits})
        headers = ["threshold", "tokens", "wrong", "forgiven", "max error", "= full model", "layers/token"]
        rows = [
            [c.name, c.tokens, c.wrong, c.forgiven, f"{c.max_error:.1e}" if c.largest_logit else "-"]
            + [percent(c.same_as_full, c.tokens)]
            + [f"{c.layers_executed / max(c.tokens, 1):.2f}"]
            + [percent(c.exits[layer], c.tokens) for layer in layers]
            for c in self.checks
        ]
        lengths = f"{min(self.prompt_lengths)}-{max(self.prompt_lengths)}"
        lines = [
            f"{self.bundle} against {self.model}",
            f"{len(self.prompt_lengths)} prompts of {lengths} tokens from {self.dataset}, {self.new_tokens} new tokens "
            f"each, max pending {self.max_pending}",
            *self._of_quantized_weights(),
            "full: HuggingFace eager; a threshold: TIDE's rule applied afterwards to all layers (token and exit layer)",
            *self._of_drafts(),
            "",
            table([*headers, *("looked up" if layer == LOOKUP_DRAFT else f"exit@{layer}" for layer in layers)], rows),
            "",
            *(f"  {c.name}: {difference}" for c in self.checks for difference in c.differences),
            *(f"  {c.name}: the logits are off by {c.max_error:.2g}" for c in self.checks if not c.logits_equal),
            *(line for together in self.together for line in together.lines()),
        ]
        forgiven = sum(check.forgiven for check in self.checks)
        verdict = "HOLDS: every token equals its reference" if self.holds else "DOES NOT HOLD"
        gap = max(check.tolerance.forgiven_gap for check in self.checks)
        note = f" ({forgiven} forgiven: reference undecided by less than {gap:g})" if forgiven else ""
        return "\n".join([*lines, verdict + note])

    def _of_drafts(self) -> list[str]:
        drafted, accepted = sum(c.drafted for c in self.checks), sum(c.accepted for c in self.checks)
        stood = f"{accepted} of {drafted} drafts stood, which are its exits"
        return [f"lossless: HuggingFace eager, tokens alone; {stood}"] if drafted else []

    def _of_quantized_weights(self) -> list[str]:
        if self.weight_error is None:
            return []
        return [
            "the model computes with what the bundle's integers stand for, "
            f"{100 * self.weight_error:.1f} % off its own weights"
        ]


def validate(
    bundle: str | os.PathLike[str],
    model_name: str,
    dataset: str | None = None,
    *,
    prompts: int = 16,
    longest_prompt: int = 128,
    new_tokens: int = 32,
    thresholds: Sequence[float] | None = None,
    max_pending: int | None = None,
    threads: int | None = None,
    provider: str | None = None,
    plugins: str | os.PathLike[str] | None = None,
) -> ValidationReport:
    """Compares a bundle with its source model on real text: full depth, each threshold, the bundle's own thresholds,
    lossless mode as it was tuned, one prompt at a time; and in each mode several prompts together, where the bundle has
    networks for that.

    Args:
        dataset: SPEC of the text prompts are cut from; None: the one the bundle's routers were calibrated on.
        prompts: how many, of 1 to `longest_prompt` tokens.
        thresholds: each used at all checkpoints alike, with no minimum of layers; None: `THRESHOLDS`.
        max_pending: None: the bundle's.
        provider: None: the graph, and the segment networks of a bundle that has them, on the CPU. Otherwise the engine
            to check, as `load` takes it; half precision is allowed the rounding of half precision.
        plugins: for the engine to check, as `load` takes it.

    Raises:
        BundleError: the bundle is unusable, or was made from other weights than `model_name`'s.
        ConfigError: a number out of range, more tokens than the model's context holds, or plugins where no TensorRT
            engine is checked.
        GenerationError: a threshold outside [0, 1], or an option that changes nothing with this bundle.
        ProviderError: the provider cannot run the bundle here.
        ModelError, DatasetError, RouterFileError: as `load_model`, `read_sequences` and `RouterSet.load`.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    pending = manifest.max_pending if max_pending is None else max_pending
    _check_request(opened, prompts, longest_prompt, new_tokens, pending)
    check_exits(opened, "exit", {"threshold": thresholds, "max_pending": max_pending})
    if plugins not in (None, NONE) and provider in (None, "cpu"):
        raise ConfigError("plugins are for TensorRT engines, of --provider tensorrt: leave --plugins away")
    spec = _dataset(opened, dataset)
    settings = _settings(opened, THRESHOLDS if thresholds is None else thresholds)
    source = load_model(model_name)
    opened.require_weights(source.weights_sha256, model_name)
    weight_error = restore(source, opened) if manifest.quantization is not None else None
    texts = pick_prompts(model_name, spec, prompts, longest_prompt)
    routers = _routers(opened, source)
    engines = _engines(opened, provider, threads, plugins)
    checks, together = list[Check](), list[Together]()
    drafts = routers is not None and manifest.kv_cache_strategy == EXACT  # lossless mode needs both
    batches = sum(prefix != FLOAT32_PREFIX for prefix, _, _ in engines)  # which compute as the bundle does
    total = len(texts) * (1 + len(settings) + drafts) * len(engines) + batches * (1 + bool(routers) + drafts)
    with stage("validate", total=total) as advance:
        for prefix, engine, tolerance in engines:
            alone = {
                "full": check_full(engine, source, texts, new_tokens, pending, f"{prefix}full", advance, tolerance)
            }
            checks.append(alone["full"])
            if routers is not None:
                exits = [
                    check_exit(
                        engine,
                        source,
                        routers,
                        texts,
                        new_tokens,
                        values,
                        pending,
                        f"{prefix}{name}",
                        advance,
                        tolerance,
                    )
                    for name, values in settings
                ]
                checks += exits
                alone["exit"] = min(exits, key=lambda check: max(check.exits.values()))  # tokens leave everywhere
            if drafts:
                alone["lossless"] = check_lossless(
                    engine, source, texts, new_tokens, advance=advance, tolerance=tolerance, name=f"{prefix}lossless"
                )
                checks.append(alone["lossless"])
            if prefix != FLOAT32_PREFIX:
                together.append(check_together(engine, source, routers, texts, alone, pending, prefix.strip(), advance))
    lengths = [len(ids) for ids in texts]
    return ValidationReport(
        str(opened.path), model_name, spec, lengths, new_tokens, pending, checks, together, weight_error
    )


def _engines(
    bundle: Bundle, provider: str | None, threads: int | None, plugins: str | os.PathLike[str] | None = None
) -> list[tuple[str, Engine, Tolerance]]:
    """What is checked, with the prefix of its names: the graph, and the segment networks where there are any."""
    networks = bundle.manifest.networks
    if provider not in (None, "cpu"):
        precision = "fp32" if networks is None else networks.weights
        engine = load(
            bundle.path, provider=provider, threads=threads, verify=False, plugins=plugins
        )  # verified already
        return [(f"{provider} ", engine, TOLERANCES[precision])]
    found = graph_engines(bundle, threads)
    if provider is None and networks is not None:
        try:
            backend = open_segments(bundle, "cpu", threads)
        except ProviderError as error:  # bfloat16: nothing on a CPU can run them
            logger.warning("the segment networks are not checked: %s", error)
        else:
            found.append(("segments ", Engine(bundle, backend), TOLERANCES[networks.weights]))
    return found


def pick_prompts(model_name: str, spec: str, count: int, longest: int) -> list[list[int]]:
    """Up to `count` prompts of 1 to `longest` tokens (more short ones than long), each the start of another text.

    Raises:
        ModelError: the model has no tokenizer.
        DatasetError: unreadable, or no text in it.
    """
    sequences = list(read_sequences(spec, load_tokenizer(model_name), longest, count))
    if len(sequences) < count:
        logger.warning("dataset %s gives %d prompts only, not %d", spec, len(sequences), count)
    lengths = np.geomspace(1, longest, len(sequences)).round().astype(int)
    return [sequence.ids[:length].tolist() for sequence, length in zip(sequences, lengths, strict=True)]


def _settings(bundle: Bundle, thresholds: Sequence[float]) -> list[tuple[str, list[float]]]:
    """Name and thresholds (one per checkpoint) of every exit check; the last is what the bundle does by default."""
    manifest = bundle.manifest
    if not manifest.checkpoints:
        return []
    settings = [(f"{value:g}", resolve_thresholds(manifest.checkpoints, value)) for value in thresholds]
    own = resolve_thresholds(manifest.checkpoints, manifest.thresholds, manifest.min_layers)
    return [*settings, ("bundle", own)]


def _routers(bundle: Bundle, source: SourceModel) -> RouterSet | None:
    """The routers stored in the bundle, checked against model and manifest; None for a bundle without checkpoints."""
    if not bundle.manifest.checkpoints:
        return None
    path = bundle.file(ROUTERS_FILE)
    routers = RouterSet.load(path)
    routers.check(source, path)
    if routers.checkpoints != bundle.manifest.checkpoints:
        raise BundleError(
            f"bundle {bundle.path}: {ROUTERS_FILE} has checkpoints {list(routers.checkpoints)} but the graph has "
            f"{list(bundle.manifest.checkpoints)}"
        )
    return routers


def _dataset(bundle: Bundle, given: str | None) -> str:
    """The SPEC to read: the one given, else the one the calibration record names."""
    record = bundle.manifest.calibration or {}
    config = record.get("config", {})
    spec = given or (config.get("calibration_dataset") if isinstance(config, dict) else None)
    if not isinstance(spec, str):
        raise ConfigError(f"bundle {bundle.path} records no calibration dataset: say which text with --dataset")
    return spec


def _check_request(bundle: Bundle, prompts: int, longest_prompt: int, new_tokens: int, max_pending: int) -> None:
    for name, value, least in (
        ("prompts", prompts, 1),
        ("longest_prompt", longest_prompt, 1),
        ("new_tokens", new_tokens, 1),
        ("max_pending", max_pending, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, not {value}")
    context = bundle.manifest.model.context_length
    if context is not None and longest_prompt + new_tokens > context:
        raise ConfigError(
            f"prompts of up to {longest_prompt} tokens and {new_tokens} new ones do not fit the model's context of "
            f"{context}"
        )
