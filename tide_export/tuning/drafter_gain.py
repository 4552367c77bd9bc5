"""Measures the speed-up of a bundle's drafts, after `draft` or `export` has written it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.tuning.auto import PROVIDER, ROUNDS, TEMPERATURE, affordable_tokens, shipped_prompts, with_lossless
from tide_export.tuning.lossless import MIN_SPEEDUP, compare
from tide_export.tuning.replay import learned, off
from tide_export.tuning.report import Comparison
from tide_export.tuning.request import LosslessRequest

METHOD = "interleaved generations after the drafter was written"


def with_drafter(
    engine: Engine, prompts: Sequence[list[int]], temperature: float, new_tokens: int
) -> tuple[Manifest, Comparison]:
    """Compares lossless mode with drafter and prompt lookup to full depth, interleaved.

    Args:
        engine: an engine on a bundle with a drafter.
        prompts: one or more, none seen by the drafter.
        new_tokens: tokens to generate after each.

    Returns:
        The manifest with the drafting (off if it is not faster) and mode auto; and the measured comparison.
    """
    checkpoints = len(engine.manifest.checkpoints)
    request = LosslessRequest(dataset="", prompts=len(prompts), new_tokens=new_tokens, temperature=temperature)
    setting = learned(checkpoints)
    tuned = engine.drafting_as(setting.drafting())
    measured = compare(engine, tuned, prompts, request)
    pays = measured.speedup >= MIN_SPEEDUP
    record: dict[str, Any] = {
        "method": METHOD,
        "pays": pays,
        "n": len(prompts),
        "new_tokens": new_tokens,
        "temperature": temperature,
        **asdict(measured),
    }
    drafting = (setting if pays else off(checkpoints)).drafting(record)
    auto = with_lossless(tuned, measured.speedup if pays else None, replace(request, slots=()), prompts)
    return replace(engine.manifest, drafting=drafting, auto=auto), measured


def with_head(bundle: Path) -> tuple[Manifest, Comparison]:
    """Compares lossless mode with the draft head of `bundle` to full depth, on shipped prompts."""
    engine, prompts, new_tokens = _opened(bundle)
    return with_drafter(engine, prompts, TEMPERATURE, new_tokens)


def with_exits(bundle: Path) -> Manifest:
    """Compares lossless mode with drafts by exits and text to full depth, on shipped prompts.

    Returns:
        The manifest with mode auto, which is lossless if that is the fastest.
    """
    engine, prompts, new_tokens = _opened(bundle)
    request = LosslessRequest(dataset="", prompts=len(prompts), new_tokens=new_tokens, temperature=TEMPERATURE)
    measured = compare(engine, engine, prompts * ROUNDS, request)
    auto = with_lossless(engine, measured.speedup, replace(request, slots=()), prompts)
    return replace(engine.manifest, auto=auto)


def _opened(bundle: Path) -> tuple[Engine, list[list[int]], int]:
    """Returns an engine on `bundle`, shipped prompts, and how many tokens to generate after each."""
    engine = load(bundle, provider=PROVIDER, verify=False)
    full = GenerationConfig(mode="full", temperature=TEMPERATURE, stop_token_ids=())
    prompts = shipped_prompts(engine)
    return engine, prompts, affordable_tokens(engine, [full, replace(full, mode="lossless")], prompts)
