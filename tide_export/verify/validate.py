"""`tide-export validate`: compares a bundle with Hugging Face and TIDE's rule, token for token.

Loads the bundle and its source model, takes prompts of many lengths from a dataset, and compares full depth and
lossless mode with Hugging Face and every threshold with the oracle (`parity`); then prompts decoded in one batch with
the same prompts alone (`batch_parity`), and model.onnx without our library with the same references (`step_graph`). The
report's `holds` is the command's exit code.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.file_names import GRAPH_FILE, ROUTERS_FILE
from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.common.changed_tokens import TEMPERATURE
from tide_export.common.formatting import attributes, percent, table
from tide_export.common.progress import stage
from tide_export.common.values import not_negative, whole_number
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.errors import BundleError, ConfigError
from tide_export.model.source import SourceModel, load_model
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import open_engine
from tide_export.runtime.providers import NAME_A_GPU
from tide_export.runtime.stats import NO_LAYER
from tide_export.runtime.tensorrt.plugins import NONE
from tide_export.thresholds.resolve import resolve_thresholds
from tide_export.verify.batch_parity import BatchCheck, check_batch
from tide_export.verify.int8_kv import rounded_kv
from tide_export.verify.parity import (
    TOLERANCES,
    Check,
    EngineUnderTest,
    Stepped,
    Tolerance,
    check_exit,
    check_full,
    check_lossless,
)
from tide_export.verify.pytorch.networks import open_torch
from tide_export.verify.quality import Quality, measure_quality, quality_texts
from tide_export.verify.quality import render as render_quality
from tide_export.verify.quantized import graph_engines, restore
from tide_export.verify.step_graph import StepGraph

logger = logging.getLogger("tide_export")
THRESHOLDS = (0.3, 0.5, 0.7, 0.85, 0.95)
GRAPH_PROMPTS = 2  # the shortest, for model.onnx: without the library's operators a step takes many times as long
OF_GRAPH = ("full", "bundle")  # names of its settings


@dataclass(frozen=True)
class ValidationReport:
    """Holds all checks of one bundle; `holds` if every one does."""

    bundle: str
    model: str
    dataset: str
    prompt_lengths: list[int]
    new_tokens: int
    max_pending: int
    checks: list[Check]
    batches: list[BatchCheck]
    weight_error: float | None = None  # of quantized weights: root of the squared error over the squared weights
    quality: list[Quality] = field(default_factory=list)  # full depth first; empty unless requested
    auto: AutoMode | None = None  # mode auto on the CPU
    kv_cache: str = FLOAT32_KV  # type of the K/V cache; the references round K/V to it

    @property
    def holds(self) -> bool:
        compared = bool(self.checks) and all(check.holds for check in self.checks)
        return compared and all(batch.holds for batch in self.batches)

    def as_dict(self) -> dict[str, Any]:
        settings = attributes(self, "bundle", "model", "dataset", "prompt_lengths", "new_tokens", "max_pending")
        return settings | {
            "undecided_gap": max(check.tolerance.undecided_gap for check in self.checks) if self.checks else None,
            "weight_error": self.weight_error,
            "kv_cache": self.kv_cache,
            "holds": self.holds,
            "auto": None if self.auto is None else asdict(self.auto),
            "checks": [check.as_dict() for check in self.checks],
            "batches": [batch.as_dict() for batch in self.batches],
            "quality": [one.as_dict() for one in self.quality],
        }

    def render(self) -> str:
        """Returns the text that the command prints."""
        layers = sorted({layer for check in self.checks for layer in check.exits})
        headers = ["threshold", "tokens", "wrong", "within tol.", "max error", "= full model", "layers/token"]
        rows = [
            [c.name, c.tokens, c.wrong, c.within_tolerance, f"{c.max_error:.1e}" if c.largest_logit else "-"]
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
            *self._weight_lines(),
            "full: Hugging Face eager; a threshold: TIDE's rule applied after running all layers (token, exit layer)"
            + ("; both with K/V rounded to int8" if self.kv_cache == INT8_KV else ""),
            *self._draft_lines(),
            "",
            table([*headers, *("drafted" if layer == NO_LAYER else f"exit@{layer}" for layer in layers)], rows),
            "",
            *(f"  {c.name}: {difference}" for c in self.checks for difference in c.differences),
            *(f"  {c.name}: the logits are off by {c.max_error:.2g}" for c in self.checks if not c.logits_equal),
            *(line for batch in self.batches for line in batch.lines()),
            *([render_quality(self.quality), ""] if self.quality else []),
        ]
        tolerated = sum(check.within_tolerance for check in self.checks)
        verdict = "HOLDS: every token equals its reference" if self.holds else "DOES NOT HOLD"
        gap = max(check.tolerance.undecided_gap for check in self.checks)
        share = max(check.tolerance.undecided_share for check in self.checks)
        or_share = f", or {100 * share:g} % of the largest logit" if share else ""
        note = (
            f" ({tolerated} within tolerance: reference undecided by less than {gap:g}{or_share})" if tolerated else ""
        )
        return "\n".join([*lines, sentence(self.auto), verdict + note])

    def _draft_lines(self) -> list[str]:
        drafted, accepted = sum(c.drafted for c in self.checks), sum(c.accepted for c in self.checks)
        exits = f"{accepted} of {drafted} drafts accepted, which are its exits"
        return [f"lossless: Hugging Face eager, tokens alone; {exits}"] if drafted else []

    def _weight_lines(self) -> list[str]:
        if self.weight_error is None:
            return []
        return [f"the model computes with the bundle's weights, {100 * self.weight_error:.1f} % off the original ones"]


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
    quality: int | None = None,
    temperature: float = TEMPERATURE,
    threads: int | None = None,
    provider: str | None = None,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
    trust_remote_code: bool = False,
) -> ValidationReport:
    """Compares a bundle with its source model on real text.

    Checks full depth, each threshold, the bundle's thresholds and lossless mode as it was tuned, one prompt at a time;
    then each mode with several prompts in a batch, and model.onnx on the shortest prompts.

    Args:
        dataset: SPEC of the text for the prompts; None: that on which the routers were calibrated.
        prompts: number of prompts, of 1 to `longest_prompt` tokens.
        thresholds: each is used at all checkpoints, without min_layers; None: `THRESHOLDS`.
        max_pending: as in `GenerationConfig`; None: the bundle's.
        quality: also measure changed tokens and perplexity on this many tokens that the routers have not seen.
        temperature: of `quality`: at which changed tokens are counted; 0: greedy.
        provider: the engine to check, as in `load`, within the rounding of its precision; None: the graph and, if the
            bundle has them, the segment networks on the CPU.
        plugins, device: options of that engine, as in `load`.
        trust_remote_code: run Python code in the model's folder (as `model.source.load_model`).

    Raises:
        BundleError: the bundle is unusable, or was made from other weights than `model_name`'s.
        ConfigError: a number is out of range, the tokens exceed the model's context, or plugins or a device are given
            for an engine that takes none.
        GenerationError: a threshold is outside [0, 1], or an option has no effect with this bundle.
        ProviderError: the provider cannot run the bundle here.
        ModelError, DatasetError, RouterFileError: as `load_model`, `read_sequences` and `RouterSet.load` raise them.
    """
    opened = open_bundle(bundle)
    pending = opened.manifest.max_pending if max_pending is None else max_pending
    _check_numbers(opened, prompts, longest_prompt, new_tokens, pending, quality)
    not_negative("temperature", temperature, ConfigError)
    if plugins not in (None, NONE) and provider in (None, "cpu"):
        raise ConfigError("plugins are for TensorRT plans, of --provider tensorrt: omit --plugins")
    if device is not None and provider in (None, "cpu"):
        raise ConfigError(NAME_A_GPU)
    engines = _engines(opened, provider, threads, plugins, device)
    for threshold in [None] if thresholds is None else thresholds:
        engines[0].engine.resolved(GenerationConfig(mode="exit", threshold=threshold, max_pending=max_pending))
    spec = _dataset(opened, dataset)
    settings = _settings(opened, THRESHOLDS if thresholds is None else thresholds)
    source = load_model(model_name, trust_remote_code=trust_remote_code)
    opened.require_weights(source.weights_sha256, model_name)
    weight_error = restore(source, opened)
    tokenizer = load_tokenizer(model_name, trust_remote_code)
    texts = pick_prompts(tokenizer, spec, prompts, longest_prompt)
    read = [] if quality is None else quality_texts(opened.manifest, tokenizer, spec, quality)
    routers = _routers(opened, source)
    total = len(engines) * len(settings) * len(texts)
    total += sum(tested.as_deployed for tested in engines) * len({setting.mode for setting in settings})
    by_graph = [one for one in settings if one.name in OF_GRAPH] if provider in (None, "cpu") else []
    total += len(by_graph) * len(texts[:GRAPH_PROMPTS])
    with stage("validate", total=total) as advance, rounded_kv(source, opened.manifest):
        run = _Run(source, routers, new_tokens, pending, advance)
        checks, batches = _compare_engines(engines, settings, texts, run)
        if by_graph:
            graph, tolerance = StepGraph(opened, threads), engines[0].tolerance
            shortest = texts[:GRAPH_PROMPTS]
            checks += [_check_steps(graph, tolerance, GRAPH_FILE, setting, shortest, run) for setting in by_graph]
    qualities = list[Quality]()
    if read:
        deployed = next(tested.engine for tested in engines if tested.as_deployed)
        exits = [(setting.name, setting.thresholds) for setting in settings if setting.mode == "exit"]
        with stage("measuring quality", total=len(read) * (1 + len(exits))) as advance:
            qualities = measure_quality(deployed, exits, read, pending, temperature, advance)
    lengths = [len(ids) for ids in texts]
    return ValidationReport(
        str(opened.path),
        model_name,
        spec,
        lengths,
        new_tokens,
        pending,
        checks,
        batches,
        weight_error,
        qualities,
        opened.manifest.auto,
        opened.manifest.kv_dtype,
    )


class _Setting(NamedTuple):
    """A setting to check on every engine; `thresholds` are those of mode exit, one per checkpoint."""

    mode: str
    name: str
    thresholds: list[float]


def _settings(bundle: Bundle, thresholds: Sequence[float]) -> list[_Setting]:
    """Lists full depth, each threshold, the bundle's thresholds in modes exit and auto, and lossless mode."""
    manifest, settings = bundle.manifest, [_Setting("full", "full", [])]
    if manifest.checkpoints:
        same = [(f"{value:g}", resolve_thresholds(manifest.checkpoints, value)) for value in thresholds]
        default = ("bundle", resolve_thresholds(manifest.checkpoints, manifest.thresholds, manifest.min_layers))
        settings += [_Setting("exit", *setting) for setting in (*same, default)]
        auto = manifest.auto
        if auto is not None and auto.mode == "exit" and auto.thresholds != manifest.thresholds:
            settings.append(_Setting("exit", "auto", resolve_thresholds(manifest.checkpoints, auto.thresholds)))
        settings.append(_Setting("lossless", "lossless", []))
    return settings


class _Run(NamedTuple):
    """Holds what is the same in all checks of a validation."""

    source: SourceModel
    routers: RouterSet | None
    new_tokens: int
    max_pending: int
    advance: Callable[[float], object]


def _compare_engines(
    engines: Sequence[EngineUnderTest], settings: Sequence[_Setting], prompts: list[list[int]], run: _Run
) -> tuple[list[Check], list[BatchCheck]]:
    """Compares every engine at every setting, and those that are deployed with several prompts at once."""
    checks, batches = list[Check](), list[BatchCheck]()
    for tested in engines:
        single = [_check(tested, setting, prompts, run) for setting in settings]
        checks += single
        if tested.as_deployed:
            given = run.source, run.routers, prompts, _one_per_mode(settings, single), run.max_pending
            batches.append(check_batch(tested.engine, *given, tested.name, run.advance))
    return checks, batches


def _check(tested: EngineUnderTest, setting: _Setting, prompts: list[list[int]], run: _Run) -> Check:
    """Compares one engine at one setting, one prompt at a time."""
    if setting.mode != "lossless":
        return _check_steps(tested.engine, tested.tolerance, tested.name, setting, prompts, run)
    name = f"{tested.name} lossless".lstrip()
    as_tuned = None, None, run.advance, tested.tolerance, name
    return check_lossless(tested.engine, run.source, prompts, run.new_tokens, *as_tuned)


def _check_steps(
    engine: Stepped, tolerance: Tolerance, of: str, setting: _Setting, prompts: list[list[int]], run: _Run
) -> Check:
    """Compares the steps of one engine, or of the graph, at a setting of mode full or exit."""
    name = f"{of} {setting.name}".lstrip()
    if run.routers is not None and setting.mode == "exit":
        exits = (setting.thresholds, run.max_pending, name, run.advance, tolerance)
        return check_exit(engine, run.source, run.routers, prompts, run.new_tokens, *exits)
    return check_full(engine, run.source, prompts, run.new_tokens, run.max_pending, name, run.advance, tolerance)


def _one_per_mode(settings: Sequence[_Setting], checks: Sequence[Check]) -> dict[str, Check]:
    """Returns one check per mode by its name in the report; for mode exit that with the most spread exits."""
    pairs = list(zip(settings, checks, strict=True))
    exits = [(setting, check) for setting, check in pairs if setting.mode == "exit"]
    spread, _ = min(exits, key=lambda pair: max(pair[1].exits.values()), default=(None, None))
    return {
        f"exit at {setting.name}" if setting.mode == "exit" else setting.mode: check
        for setting, check in pairs
        if setting.mode != "exit" or setting is spread
    }


def _engines(
    bundle: Bundle,
    provider: str | None,
    threads: int | None,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
) -> list[EngineUnderTest]:
    """Opens the engine of `provider`; by default the graph and, if the bundle has them, segment networks."""
    networks = bundle.manifest.networks
    if provider not in (None, "cpu"):
        engine = open_engine(bundle, provider, threads, False, plugins, device)
        return [EngineUnderTest(str(provider), engine, TOLERANCES[networks.precision if networks else "fp32"])]
    engines = list(graph_engines(bundle, threads))
    if provider is None and networks is not None:
        # ONNX Runtime does not run bfloat16 on the CPU.
        half = networks.weights == "bf16"
        if half and bundle.manifest.has_cuda_networks:
            logger.warning("the networks are bfloat16 for CUDA, which nothing runs on a CPU: give --provider cuda")
            return engines
        engine = open_torch(bundle) if half else open_engine(bundle, "cpu-networks", threads)
        engines.append(EngineUnderTest("segments", engine, TOLERANCES[networks.precision]))
    return engines


def pick_prompts(tokenizer: PreTrainedTokenizerBase, spec: str, count: int, longest: int) -> list[list[int]]:
    """Reads up to `count` prompts of 1 to `longest` tokens, more short than long, each of another text.

    Raises:
        DatasetError: the dataset cannot be read or holds no text.
    """
    sequences = list(read_sequences(spec, tokenizer, longest, count))
    if len(sequences) < count:
        logger.warning("dataset %s gives %d prompts only, not %d", spec, len(sequences), count)
    lengths = np.geomspace(1, longest, len(sequences)).round().astype(int)
    return [sequence.ids[:length].tolist() for sequence, length in zip(sequences, lengths, strict=True)]


def _routers(bundle: Bundle, source: SourceModel) -> RouterSet | None:
    """Loads the bundle's routers and checks them against model and manifest; None without checkpoints."""
    if not bundle.manifest.checkpoints:
        return None
    file = bundle.file(ROUTERS_FILE)
    routers = RouterSet.load(file.descriptor_path)
    routers.check(source, file.path)
    if routers.checkpoints != bundle.manifest.checkpoints:
        raise BundleError(
            f"bundle {bundle.path}: {ROUTERS_FILE} has checkpoints {list(routers.checkpoints)} but the graph has "
            f"{list(bundle.manifest.checkpoints)}"
        )
    return routers


def _dataset(bundle: Bundle, dataset: str | None) -> str:
    """Returns the SPEC to read: `dataset`, else that of the calibration record."""
    record = bundle.manifest.calibration or {}
    config = record.get("config", {})
    config = config if isinstance(config, dict) else {}
    spec = dataset or config.get("self_generated") or config.get("calibration_dataset")
    if not isinstance(spec, str):
        raise ConfigError(f"bundle {bundle.path} records no calibration dataset: say which text with --dataset")
    return spec


def _check_numbers(
    bundle: Bundle, prompts: int, longest_prompt: int, new_tokens: int, max_pending: int, quality: int | None
) -> None:
    for name, value, minimum in (
        ("prompts", prompts, 1),
        ("longest_prompt", longest_prompt, 1),
        ("new_tokens", new_tokens, 1),
        ("max_pending", max_pending, 0),
        ("quality", 2 if quality is None else quality, 2),
    ):
        whole_number(name, value, minimum, error=ConfigError)
    context = bundle.manifest.model.context_length
    if context is not None and longest_prompt + new_tokens > context:
        raise ConfigError(
            f"prompts of up to {longest_prompt} tokens and {new_tokens} new ones do not fit the model's context of "
            f"{context}"
        )
