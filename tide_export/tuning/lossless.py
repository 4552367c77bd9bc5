"""`tide-export tune --mode lossless`: how to draft on this machine to get most tokens a second, or not at all.

Lossless mode gives the full model's tokens whatever is drafted, so nothing here is about quality. The flow: prompts ->
the model's own greedy continuations -> what routers and early tokens say along them -> `drafting` finds the setting a
replay expects most of -> full and lossless mode really generate in turns on other documents -> the manifest. When the
measured speed-up is not worth it, drafting is stored as off and the report says so.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from tide_export.bundle.manifest import PROPAGATE, Drafting
from tide_export.bundle.store import replace_manifest
from tide_export.errors import BundleError, ConfigError, TuneError
from tide_export.formatting import table
from tide_export.progress import stage
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.tuning.measure import measure_prompts
from tide_export.tuning.prompts import Prompts, draw_prompts
from tide_export.tuning.replay import Setting, StepCosts, best_setting, look_up, replay, step_costs
from tide_export.version import __version__

logger = logging.getLogger("tide_export")

PAYS = 1.03  # measured speed-up below which drafting is not worth its trouble
METHOD = "replay of recorded continuations, confirmed by interleaved generations"


@dataclass(frozen=True)
class LosslessReport:
    """The outcome of one `tune --mode lossless`.

    Attributes:
        setting: what the replay found best, all thresholds 1.0 where nothing was expected to pay.
        costs: single steps on this machine, seconds.
        expected_acceptance: share of drafts (exits and lookups) confirmed in the replay.
        speedup: measured, median over the confirming prompts of full's decoding time over lossless mode's; 1.0 where
            nothing was measured because nothing was expected.
        acceptance: share of drafts confirmed in these generations.
        lookup_drafted: share of drafts that came from earlier text in these generations.
        pays: whether the setting is stored; else drafting is off.
    """

    bundle: str
    dataset: str
    prompts: Prompts
    prompt_length: int
    new_tokens: int
    threads: int | None
    seed: int
    checkpoints: tuple[int, ...]
    setting: Setting
    costs: StepCosts
    expected_acceptance: float
    speedup: float
    acceptance: float
    lookup_drafted: float
    pays: bool
    stored: bool
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def drafting(self) -> Drafting:
        """What the manifest keeps."""
        setting = self.setting
        if not self.pays:
            setting = replace(
                setting, thresholds=(MAX_THRESHOLD,) * len(self.checkpoints), max_drafts=0, prompt_lookup=0
            )
        return Drafting(setting.thresholds, setting.max_drafts, setting.prompt_lookup, setting.min_match, self.record())

    def record(self) -> dict[str, Any]:
        """JSON types, everything needed to do it again."""
        return {
            "method": METHOD,
            "pays": self.pays,
            "speedup": self.speedup,
            "acceptance": self.acceptance,
            "lookup_drafted": self.lookup_drafted,
            "expected_speedup": self.setting.speedup,
            "expected_acceptance": self.expected_acceptance,
            "tried_thresholds": list(self.setting.thresholds),
            "tried_max_drafts": self.setting.max_drafts,
            "tried_lookup": self.setting.prompt_lookup,
            "tried_least_match": self.setting.min_match,
            "draft_seconds": list(self.costs.draft),
            "verify_seconds": {str(n): seconds for n, seconds in self.costs.verify.items()},
            "block_seconds": {str(n): seconds for n, seconds in self.costs.block.items()},
            "full_seconds": self.costs.plain,
            "path_prompts": len(self.prompts.path),
            "n": len(self.prompts.calibration),
            "prompt_length": self.prompt_length,
            "new_tokens": self.new_tokens,
            "threads": self.threads,
            "dataset": self.dataset,
            "dataset_sha256": self.prompts.dataset_sha256,
            "seed": self.seed,
            "tide_export": __version__,
            "date": self.date,
        }

    def as_dict(self) -> dict[str, Any]:
        """`record`, and what it was done to."""
        return {
            "bundle": self.bundle,
            "stored": self.stored,
            "checkpoints": list(self.checkpoints),
            "drafting": {key: value for key, value in asdict(self.drafting()).items() if key != "tuning"},
            **self.record(),
        }

    def render(self) -> str:
        """The text the command prints."""
        plain = self.costs.plain
        rows = [["full depth", f"{1e3 * plain:.3f}", "1.00x"]]
        rows += [
            [f"draft after layer {layers}", f"{1e3 * seconds:.3f}", f"{seconds / plain:.2f}x"]
            for layers, seconds in zip(self.checkpoints, self.costs.draft, strict=True)
        ]
        rows += [
            [f"verifying {n} that waited", f"{1e3 * seconds:.3f}", f"{seconds / plain:.2f}x"]
            for n, seconds in (self.costs.verify if self.checkpoints else {}).items()
        ]
        rows += [
            [f"{n} at once", f"{1e3 * seconds:.3f}", f"{seconds / plain:.2f}x"]
            for n, seconds in self.costs.block.items()
        ]
        found = f"best setting: {_told(self.setting)}; expected {self.setting.speedup:.2f}x with "
        found += f"{self.expected_acceptance:.0%} of drafts confirmed"
        if self.setting.speedup <= 1.0:
            found = "no setting is expected to be faster than full depth"
        measured = f"measured on {len(self.prompts.calibration)} other prompts: {self.speedup:.2f}x, "
        measured += (
            f"{self.acceptance:.0%} of drafts confirmed ({self.lookup_drafted:.0%} of them looked up), every token "
        )
        measured += "that of full depth"
        verdict = (
            f"PAYS: lossless mode is {self.speedup:.2f}x as fast as full depth here"
            if self.pays
            else "DOES NOT PAY: lossless mode stays at full depth"
        )
        lines = [f"{self.bundle} on {self.dataset}", "", table(["step", "ms", "x full"], rows), "", found]
        if self.setting.speedup > 1.0:
            lines.append(measured)
        done = "stored: what lossless mode does from now on" if self.stored else "dry run: the bundle is unchanged"
        return "\n".join([*lines, verdict, done])


def tune_lossless(
    bundle: str | os.PathLike[str],
    dataset: str,
    *,
    prompts: int = 48,
    prompts_per_document: int = 4,
    prompt_length: int = 48,
    new_tokens: int = 64,
    threads: int | None = None,
    seed: int = 0,
    dry_run: bool = False,
) -> LosslessReport:
    """Finds how lossless mode should draft on this machine.

    Args:
        bundle: the folder; its manifest is replaced in one step at the end, or not at all.
        dataset: SPEC of the text prompts are cut from; documents the routers were fitted on are left out.
        prompts: drawn at most; a third of the documents is for finding the setting, the others confirm it.
        prompt_length, new_tokens: tokens of a prompt, and generated behind it.
        threads: of ONNX Runtime; None: one per physical core. Use what will be used at work.
        seed: of the draw of prompts.
        dry_run: leave the bundle as it is.

    Raises:
        ConfigError: a number out of range.
        TuneError: fewer than two documents are usable, or lossless mode gave another token than full depth.
        BundleError: the bundle is unusable, cannot be written to, or changed meanwhile.
        DatasetError: the dataset cannot be read or holds no text.
    """
    for name, value, least in (
        ("prompts", prompts, 2),
        ("prompts_per_document", prompts_per_document, 1),
        ("prompt_length", prompt_length, 1),
        ("new_tokens", new_tokens, 2),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, not {value}")
    engine = load(bundle, provider="cpu", threads=threads)
    opened, manifest = engine.bundle, engine.manifest
    if manifest.kv_cache_strategy == PROPAGATE:
        raise TuneError(f"bundle {opened.path} propagates K/V, and lossless mode needs an exact cache")
    context = manifest.model.context_length
    if context is not None and prompt_length + new_tokens > context:
        raise ConfigError(
            f"prompt_length and new_tokens make {prompt_length + new_tokens} tokens but the model's context holds "
            f"{context}"
        )
    if not dry_run and not os.access(opened.path, os.W_OK):
        raise BundleError(f"bundle {opened.path} cannot be written to: the setting could not be stored")
    with stage("reading prompts"):
        drawn = draw_prompts(
            dataset,
            BundleTokenizer(opened.path),
            manifest.calibration,
            length=prompt_length,
            count=prompts,
            per_document=prompts_per_document,
            seed=seed,
        )
    with stage("recording continuations", total=2 * len(drawn.path)) as advance:
        texts = []
        for prompt in drawn.path:
            texts.append(prompt + _full(engine, prompt, new_tokens)[0][:-1])
            advance(1)
        recorded = measure_prompts(engine, texts, prompt_length, manifest.checkpoints, advance)
    with stage("timing steps"):
        costs = step_costs(engine, texts[0])
    with stage("choosing a setting"):
        setting = best_setting(recorded, costs, drawn.path)
        lookups = look_up(drawn.path, recorded.full, setting.min_match)
        replayed = replay(recorded, costs, setting.thresholds, setting.max_drafts, lookups, setting.prompt_lookup)
    confirmed = Confirmed(1.0, 0, 0, 0)
    if setting.speedup > 1.0:
        confirmed = _confirm(engine, drawn.calibration, new_tokens, setting)
    report = LosslessReport(
        bundle=str(opened.path),
        dataset=dataset,
        prompts=drawn,
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        threads=threads,
        seed=seed,
        checkpoints=manifest.checkpoints,
        setting=setting,
        costs=costs,
        expected_acceptance=_share(
            replayed.accepted + replayed.lookup_accepted, replayed.drafted + replayed.lookup_drafted
        ),
        speedup=confirmed.speedup,
        acceptance=_share(confirmed.accepted, confirmed.drafted),
        lookup_drafted=_share(confirmed.lookup_drafted, confirmed.drafted),
        pays=confirmed.speedup >= PAYS,
        stored=not dry_run,
    )
    if not report.pays:
        logger.warning(
            "drafting does not pay here: %.2fx measured; lossless mode stays at full depth", confirmed.speedup
        )
    if not dry_run:
        replace_manifest(opened, replace(manifest, drafting=report.drafting()))
    return report


def _full(engine: Engine, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """Greedy tokens of full depth and the seconds of decoding them."""
    out = engine.generate(prompt, max_new_tokens=new_tokens, mode="full", stop_token_ids=[])
    return out.tokens, out.stats.decode_seconds


@dataclass(frozen=True)
class Confirmed:
    """Generations in both modes in turns: the median speed-up, drafts, those confirmed, those from earlier text."""

    speedup: float
    drafted: int
    accepted: int
    lookup_drafted: int


def _confirm(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, setting: Setting) -> Confirmed:
    drafting = Drafting(setting.thresholds, setting.max_drafts, setting.prompt_lookup, setting.min_match, {})
    tuned = engine.drafting_as(drafting)
    ratios, drafted, accepted, lookup_drafted = [], 0, 0, 0
    with stage("confirming", total=len(prompts)) as advance:
        for number, prompt in enumerate(prompts):
            seconds: dict[str, float] = {}
            for mode in ("full", "lossless") if number % 2 else ("lossless", "full"):
                if mode == "full":
                    tokens, seconds[mode] = _full(engine, prompt, new_tokens)
                    continue
                out = tuned.generate(prompt, max_new_tokens=new_tokens, mode="lossless", stop_token_ids=[])
                seconds[mode] = out.stats.decode_seconds
                drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
                lookup_drafted += out.stats.lookup_drafted
            if out.tokens != tokens:
                first = next(i for i, pair in enumerate(zip(out.tokens, tokens, strict=True)) if pair[0] != pair[1])
                raise TuneError(
                    f"lossless mode gave another token than full depth at position {first} behind prompt {number}: "
                    "two of the model's logits are equal within rounding there, or the bundle is broken (validate it)"
                )
            ratios.append(seconds["full"] / seconds["lossless"])
            advance(1)
    return Confirmed(median(ratios), drafted, accepted, lookup_drafted)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _told(setting: Setting) -> str:
    thresholds = ", ".join("off" if value >= MAX_THRESHOLD else f"{value:.4f}" for value in setting.thresholds)
    exits = f"thresholds {thresholds}, at most {setting.max_drafts} early exits" if thresholds else "no early exits"
    if not setting.prompt_lookup:
        return f"{exits}, nothing looked up"
    return f"{exits}, up to {setting.prompt_lookup} tokens looked up behind {setting.min_match} or more seen before"
