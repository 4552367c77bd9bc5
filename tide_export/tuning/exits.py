"""`tide-export tune`: thresholds with a guarantee, found and tested on the deployed graph itself.

The flow, one module a stage: documents -> `prompts` -> `measure` -> `choose` (candidates on one part of the documents,
`guarantee`'s tests on the other) -> `report` -> the bundle's manifest. From then on the bundle uses what was certified.
docs/guide/guarantee.md says what is promised and what is not.
"""

import logging
import os
from dataclasses import replace

from tide_export.bundle.manifest import PROPAGATE
from tide_export.bundle.store import Bundle, replace_manifest
from tide_export.errors import BundleError, ConfigError, TuneError
from tide_export.progress import stage
from tide_export.runtime.engine import load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.tuning.choose import candidates, certify
from tide_export.tuning.guarantee import prompts_needed
from tide_export.tuning.measure import measure_prompts
from tide_export.tuning.prompts import Prompts, draw_prompts
from tide_export.tuning.report import TuningReport

__all__ = ["TuningReport", "tune"]

logger = logging.getLogger("tide_export")


def tune(
    bundle: str | os.PathLike[str],
    dataset: str,
    *,
    epsilon: float,
    delta: float,
    model: str | None = None,
    prompts: int = 600,
    prompts_per_document: int = 1,
    prompt_length: int = 32,
    positions: int = 32,
    min_layers: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    dry_run: bool = False,
) -> TuningReport:
    """Finds the thresholds that save most layers while the bundle still answers like its full depth, with a guarantee.

    With probability 1 - `delta` over the prompts tested, the mean share of positions at which the stored thresholds
    give another greedy token than full depth is at most `epsilon`, for prompts drawn like those. When no candidate
    passes, the bundle is set to exit nowhere.

    Args:
        bundle: the folder; its manifest is replaced in one step at the end, or not at all.
        dataset: SPEC of the text; documents the routers were fitted on are left out.
        epsilon, delta: in (0, 1).
        model: when given, the bundle must have been made from its weights. Nothing else needs the model.
        prompts: drawn at most; a third of the documents is for choosing candidates, the others are for the test.
        prompts_per_document: at most. With 1 the prompts are as independent as the documents are.
        prompt_length: tokens before the first scored position.
        positions: scored per prompt.
        min_layers: checkpoints with fewer layers never exit; stored too. None: the bundle's.
        threads: of ONNX Runtime; None: one per physical core.
        seed: of the draw of prompts.
        dry_run: leave the bundle as it is.

    Raises:
        ConfigError: a number out of range.
        TuneError: too few prompts for `epsilon` and `delta` whatever they show (told before the graph runs), no
            document the routers have not seen, or no checkpoint that may exit.
        BundleError: the bundle is unusable, was made from other weights, cannot be written to, or changed meanwhile.
        DatasetError, ModelError: as `Documents` and `load_model`.
    """
    _check_numbers(epsilon, delta, prompts, prompts_per_document, prompt_length, positions, min_layers, seed)
    engine = load(bundle, provider="cpu", threads=threads)
    opened, manifest = engine.bundle, engine.manifest
    if manifest.kv_cache_strategy == PROPAGATE:
        raise TuneError(
            f"bundle {opened.path} propagates K/V, so what a token says depends on the exits before it, and single "
            "positions certify nothing: export it with kv_cache_strategy exact"
        )
    least = manifest.min_layers if min_layers is None else min_layers
    may_exit = [layers for layers in manifest.checkpoints if layers >= least]
    _check_request(opened, may_exit, least, prompt_length + positions - 1)
    if model is not None:
        _check_weights(opened, model)
    if not dry_run and not os.access(opened.path, os.W_OK):
        raise BundleError(f"bundle {opened.path} cannot be written to: the thresholds could not be stored")

    # Only then is a loss nothing but 0 or 1, and one prompt's no hint at another's: the sum is binomial.
    binary = positions == 1 and prompts_per_document == 1
    with stage("reading prompts"):
        drawn = draw_prompts(
            dataset,
            BundleTokenizer(opened.path),
            manifest.calibration,
            length=prompt_length + positions - 1,
            count=prompts,
            per_document=prompts_per_document,
            seed=seed,
        )
    _refuse_too_few(drawn, dataset, epsilon, delta, binary)
    with stage("running the graph", total=len(drawn.path) + len(drawn.calibration)) as advance:
        path = measure_prompts(engine, drawn.path, prompt_length, may_exit, advance)
        calibration = measure_prompts(engine, drawn.calibration, prompt_length, may_exit, advance)
    with stage("choosing candidates"):
        sequence = candidates(path, epsilon)
    tested = certify(calibration, sequence, epsilon, delta, binary)

    passed = [one for one in tested if one.passed]
    best = passed[-1] if passed else None
    found = dict(zip(may_exit, best.thresholds, strict=True)) if best else {}
    report = TuningReport(
        bundle=str(opened.path),
        dataset=dataset,
        epsilon=epsilon,
        delta=delta,
        prompts=drawn,
        prompts_per_document=prompts_per_document,
        prompt_length=prompt_length,
        positions=positions,
        p_value_kind="binomial" if binary else "hoeffding-bentkus",
        seed=seed,
        checkpoints=manifest.checkpoints,
        num_layers=manifest.model.num_layers,
        thresholds=tuple(found.get(layers, MAX_THRESHOLD) for layers in manifest.checkpoints),
        min_layers=least,
        certified=best,
        tested=tested,
        candidates=len(sequence),
        stored=not dry_run,
    )
    if best is None:
        logger.warning(
            "no thresholds passed at epsilon %g and delta %g: %s",
            epsilon,
            delta,
            "a tuned bundle would exit nowhere" if dry_run else "the bundle exits nowhere from now on",
        )
    if not dry_run:
        replace_manifest(
            opened, replace(manifest, thresholds=report.thresholds, min_layers=least, tuning=report.record())
        )
    return report


def _check_numbers(
    epsilon: float,
    delta: float,
    prompts: int,
    prompts_per_document: int,
    prompt_length: int,
    positions: int,
    min_layers: int | None,
    seed: int,
) -> None:
    for name, share in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < share < 1:
            raise ConfigError(f"{name} must lie between 0 and 1, not {share!r}")
    for name, value, least in (
        ("prompts", prompts, 2),
        ("prompts_per_document", prompts_per_document, 1),
        ("prompt_length", prompt_length, 1),
        ("positions", positions, 1),
        ("min_layers", min_layers or 0, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, not {value}")


def _check_request(bundle: Bundle, may_exit: list[int], min_layers: int, length: int) -> None:
    manifest = bundle.manifest
    if not manifest.checkpoints:
        raise TuneError(f"bundle {bundle.path} has no checkpoints: there are no thresholds to tune")
    if not may_exit:
        raise TuneError(
            f"bundle {bundle.path}: min_layers is {min_layers} but the last checkpoint comes after layer "
            f"{manifest.checkpoints[-1]}, so nothing may exit; give a lower --min-layers"
        )
    context = manifest.model.context_length
    if context is not None and length > context:
        raise ConfigError(
            f"prompt_length and positions make sequences of {length} tokens but the model's context holds {context}"
        )


def _check_weights(bundle: Bundle, model: str) -> None:
    from tide_export.model.source import load_model

    found, expected = load_model(model).weights_sha256, bundle.manifest.model.weights_sha256
    if found != expected:
        raise BundleError(
            f"bundle {bundle.path} was made from other weights than those of {model} "
            f"(sha256 {expected[:12]}, not {found[:12]})"
        )


def _refuse_too_few(drawn: Prompts, dataset: str, epsilon: float, delta: float, binary: bool) -> None:
    """Before hours of measuring that could not end well."""
    needed, there = prompts_needed(epsilon, delta, binary=binary), len(drawn.calibration)
    if there < needed:
        raise TuneError(
            f"epsilon {epsilon:g} at delta {delta:g} needs {needed} prompts to test on even if no token differs, and "
            f"about {round(1.5 * needed)} in all, but dataset {dataset!r} gives {there} for the test and "
            f"{len(drawn.path)} to choose candidates ({drawn.path_documents + drawn.calibration_documents} documents, "
            f"{drawn.seen} more were seen by the routers): give more text, or raise --prompts, --prompts-per-document "
            "or epsilon"
        )
