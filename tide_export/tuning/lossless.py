"""Finds the fastest drafting of lossless mode on this machine (`tune --mode lossless`).

Drafts never change the tokens of lossless mode, so only speed counts. The model's continuations of some prompts are
recorded; `replay` estimates the fastest setting; full and lossless mode then generate, interleaved, from prompts of
other documents. If the measured speed-up is too small, drafting is stored as off.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from tide_export.common.progress import stage
from tide_export.errors import TuneError
from tide_export.runtime.engine import Engine
from tide_export.runtime.generation import Generation
from tide_export.tuning.auto import with_lossless
from tide_export.tuning.measure import measure_prompts
from tide_export.tuning.prompts import Prompts
from tide_export.tuning.replay import best_setting, learned, off, replay, step_costs
from tide_export.tuning.report import Comparison, LosslessReport
from tide_export.tuning.request import LosslessRequest

logger = logging.getLogger("tide_export")

MIN_SPEEDUP = 1.03  # measured; below it, drafting is stored as off


def tune_lossless(engine: Engine, request: LosslessRequest, prompts: Prompts) -> LosslessReport:
    """Finds the fastest drafting, for `tuning.tune.tune`."""
    checkpoints = engine.manifest.checkpoints
    with stage("recording continuations", total=2 * len(prompts.path)) as advance:
        texts = []
        for seed, prompt in enumerate(prompts.path):
            texts.append([*prompt, *_decode(engine, prompt, request, "full", seed).tokens])
            advance(1)
        inputs = [text[:-1] for text in texts]  # no prediction is needed after the last token
        recorded = measure_prompts(
            engine, inputs, request.prompt_length, checkpoints, advance, temperature=request.temperature
        )
        recorded = replace(recorded, full=np.array([text[request.prompt_length :] for text in texts]))
    with stage("timing steps"):
        costs = step_costs(engine, texts[0])
    with stage("choosing a setting"):
        best = best_setting(recorded, costs, prompts.path)
        settings = [best] if (best.speedup or 0.0) > 1.0 else []
        if engine.manifest.drafter is not None:
            settings.append(learned(len(checkpoints)))
    setting, measured = off(len(checkpoints)), Comparison(1.0)
    for number, tried in enumerate(settings):
        comparison = compare(engine, engine.drafting_as(tried.drafting()), prompts.calibration, request)
        if number == 0 or comparison.speedup > measured.speedup:
            setting, measured = tried, comparison
    expected = replay(recorded, costs, prompts.path, setting)
    tuned = engine.drafting_as(setting.drafting())
    pays = measured.speedup >= MIN_SPEEDUP
    if not pays:
        logger.warning(
            "drafting does not pay here: %.2fx measured; lossless mode stays at full depth", measured.speedup
        )
    with stage("measuring several at once"):
        auto = with_lossless(tuned, measured.speedup if pays else None, request, prompts.calibration)
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
        auto=auto,
    )


def _decode(engine: Engine, prompt: Sequence[int], request: LosslessRequest, mode: str, seed: int) -> Generation:
    return engine.generate(
        prompt,
        max_new_tokens=request.new_tokens,
        mode=mode,
        temperature=request.temperature,
        seed=seed,
        stop_token_ids=[],
    )


def compare(engine: Engine, tuned: Engine, prompts: Sequence[Sequence[int]], request: LosslessRequest) -> Comparison:
    """Times full and lossless mode on the same prompts, interleaved.

    Raises:
        TuneError: the two modes gave different greedy tokens. Sampled ones are not compared, because rounding may
            decide a draw among thousands of unlikely tokens.
    """
    ratios, drafts = [], dict[str, list[int]]()
    with stage("comparing with full depth", total=len(prompts)) as advance:
        for number, prompt in enumerate(prompts):
            if number % 2:
                full = _decode(engine, prompt, request, "full", number)
                out = _decode(tuned, prompt, request, "lossless", number)
            else:
                out = _decode(tuned, prompt, request, "lossless", number)
                full = _decode(engine, prompt, request, "full", number)
            for source, counts in out.stats.drafts.items():
                drafts[source] = [sum(both) for both in zip(drafts.get(source, [0, 0]), counts, strict=True)]
            if request.temperature == 0 and out.tokens != full.tokens:
                first = next(
                    i for i, pair in enumerate(zip(out.tokens, full.tokens, strict=True)) if pair[0] != pair[1]
                )
                raise TuneError(
                    f"lossless mode gave another token than full depth at position {first} after prompt {number}: "
                    "two of the model's logits are equal within rounding there, or the bundle is broken (validate it)"
                )
            ratios.append(full.stats.decode_seconds / out.stats.decode_seconds)
            advance(1)
    return Comparison(median(ratios), drafts)
