"""Finds exit thresholds with a guarantee on the deployed graph (`tune --mode exit`).

Candidates are chosen on some of the documents (`choose`) and tested on the others (`guarantee`).
"""

import logging
from dataclasses import asdict

from tide_export.common.progress import stage
from tide_export.errors import TuneError
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.tuning.auto import with_exits
from tide_export.tuning.choose import candidates, certify
from tide_export.tuning.guarantee import prompts_needed
from tide_export.tuning.measure import measure_prompts
from tide_export.tuning.prompts import Prompts
from tide_export.tuning.report import ExitReport
from tide_export.tuning.request import ExitRequest

logger = logging.getLogger("tide_export")


def tune_exits(engine: Engine, request: ExitRequest, prompts: Prompts) -> ExitReport:
    """Finds the certified thresholds that save most layers, for `tuning.tune.tune`."""
    _require_enough(prompts, request)
    manifest = engine.manifest
    min_layers = manifest.min_layers if request.min_layers is None else request.min_layers
    may_exit = [layers for layers in manifest.checkpoints if layers >= min_layers]
    with stage("running the graph", total=len(prompts.path) + len(prompts.calibration)) as advance:
        path, calibration = (
            measure_prompts(engine, some, request.prompt_length, may_exit, advance, request.temperature, seed)
            for some, seed in ((prompts.path, 0), (prompts.calibration, len(prompts.path)))  # no noise is drawn twice
        )
    with stage("choosing candidates"):
        sequence = candidates(path, request.epsilon)
    tested = certify(
        path, calibration, sequence, request.epsilon, request.delta, request.perplexity_epsilon, request.binary
    )

    best = next((one for one in reversed(tested) if one.passed), None)
    certified = dict(zip(may_exit, best.thresholds, strict=True)) if best else {}
    if best is None:
        logger.warning(
            "no thresholds passed at epsilon %g and delta %g: %s",
            request.epsilon,
            request.delta,
            "a tuned bundle would exit nowhere" if request.dry_run else "the bundle exits nowhere from now on",
        )
    thresholds = tuple(certified.get(layers, MAX_THRESHOLD) for layers in manifest.checkpoints)
    with stage("measuring what exits gain here"):
        change = asdict(best.change) | {"perplexity_epsilon": request.perplexity_epsilon} if best else {}
        auto = with_exits(engine, thresholds, request.epsilon, change, request.threads, request.slots)
    return ExitReport(
        bundle=str(engine.bundle.path),
        request=request,
        prompts=prompts,
        checkpoints=manifest.checkpoints,
        num_layers=manifest.model.num_layers,
        loops=manifest.model.loops or 1,
        thresholds=thresholds,
        min_layers=min_layers,
        certified=best,
        tested=tested,
        candidates=len(sequence),
        auto=auto,
    )


def _require_enough(prompts: Prompts, request: ExitRequest) -> None:
    """Checks that the prompts can certify anything, before hours of measuring."""
    needed = prompts_needed(request.epsilon, request.delta)
    if len(prompts.calibration) < needed:
        raise TuneError(
            f"epsilon {request.epsilon:g} at delta {request.delta:g} needs {needed} prompts to test on even if no "
            f"token changes, and about {round(1.5 * needed)} in all, but dataset {request.dataset!r} gives "
            f"{len(prompts.calibration)} for the test and {len(prompts.path)} to choose candidates "
            f"({len(prompts.document_hashes)} documents, {prompts.seen} more were seen by the routers): give more "
            "text, or raise --prompts, --prompts-per-document or epsilon"
        )
