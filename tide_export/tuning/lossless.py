"""Mode lossless of `tune`: how to draft on this machine to get most tokens a second, or not at all.

Lossless mode gives the full model's tokens whatever is drafted, so nothing here is about quality. The model's greedy
continuations of some prompts are recorded; `replay` finds the setting that should be fastest; full and lossless mode
then really generate, interleaved, from prompts of other documents. Where the measured speed-up is too small, drafting
is stored as off.
"""

import logging
from collections.abc import Sequence
from statistics import median

from tide_export.bundle.manifest import Drafting
from tide_export.errors import TuneError
from tide_export.progress import stage
from tide_export.runtime.engine import Engine
from tide_export.tuning.auto import with_lossless
from tide_export.tuning.measure import measure_prompts
from tide_export.tuning.prompts import Prompts
from tide_export.tuning.replay import Setting, best_setting, lookup_matches, replay, step_costs
from tide_export.tuning.report import Comparison, LosslessReport
from tide_export.tuning.request import LosslessRequest

logger = logging.getLogger("tide_export")

MIN_SPEEDUP = 1.03  # measured; below it drafting is stored as off


def tune_lossless(engine: Engine, request: LosslessRequest, prompts: Prompts) -> LosslessReport:
    """Finds the fastest way to draft; see `tuning.tune.tune`."""
    checkpoints = engine.manifest.checkpoints
    with stage("recording continuations", total=2 * len(prompts.path)) as advance:
        texts = []
        for prompt in prompts.path:
            texts.append(prompt + _decode_full(engine, prompt, request.new_tokens)[0][:-1])
            advance(1)
        recorded = measure_prompts(engine, texts, request.prompt_length, checkpoints, advance)
    with stage("timing steps"):
        costs = step_costs(engine, texts[0])
    with stage("choosing a setting"):
        setting = best_setting(recorded, costs, prompts.path)
        matches = lookup_matches(prompts.path, recorded.full, setting.min_match)
        expected = replay(recorded, costs, setting.thresholds, setting.max_drafts, matches, setting.prompt_lookup)
    measured = Comparison(1.0, 0, 0, 0)
    if setting.speedup > 1.0:
        measured = _compare(engine, prompts.calibration, request.new_tokens, setting)
    pays = measured.speedup >= MIN_SPEEDUP
    if not pays:
        logger.warning(
            "drafting does not pay here: %.2fx measured; lossless mode stays at full depth", measured.speedup
        )
    return LosslessReport(
        bundle=str(engine.bundle.path),
        request=request,
        prompts=prompts,
        checkpoints=checkpoints,
        setting=setting,
        costs=costs,
        expected=expected,
        measured=measured,
        pays=pays,
        auto=with_lossless(engine, measured.speedup if pays else None, request.threads),
    )


def _decode_full(engine: Engine, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """Greedy tokens of full depth and the seconds of decoding them."""
    out = engine.generate(prompt, max_new_tokens=new_tokens, mode="full", stop_token_ids=[])
    return out.tokens, out.stats.decode_seconds


def _compare(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, setting: Setting) -> Comparison:
    """Times full and lossless mode on the same prompts, interleaved. Raises TuneError: the two modes gave different
    tokens."""
    drafting = Drafting(setting.thresholds, setting.max_drafts, setting.prompt_lookup, setting.min_match, {})
    tuned = engine.drafting_as(drafting)
    ratios, drafted, accepted, lookup_drafted = [], 0, 0, 0
    with stage("comparing with full depth", total=len(prompts)) as advance:
        for number, prompt in enumerate(prompts):
            seconds: dict[str, float] = {}
            for mode in ("full", "lossless") if number % 2 else ("lossless", "full"):
                if mode == "full":
                    tokens, seconds[mode] = _decode_full(engine, prompt, new_tokens)
                    continue
                out = tuned.generate(prompt, max_new_tokens=new_tokens, mode="lossless", stop_token_ids=[])
                seconds[mode] = out.stats.decode_seconds
                drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
                lookup_drafted += out.stats.lookup_drafted
            if out.tokens != tokens:
                first = next(i for i, pair in enumerate(zip(out.tokens, tokens, strict=True)) if pair[0] != pair[1])
                raise TuneError(
                    f"lossless mode gave another token than full depth at position {first} after prompt {number}: "
                    "two of the model's logits are equal within rounding there, or the bundle is broken (validate it)"
                )
            ratios.append(seconds["full"] / seconds["lossless"])
            advance(1)
    return Comparison(median(ratios), drafted, accepted, lookup_drafted)
