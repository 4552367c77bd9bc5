"""`tide-export tune`: sets a bundle's exit thresholds with a guarantee, or its fastest drafting.

Documents -> `prompts` -> `exits` (`measure` -> `choose` -> `guarantee`) or `lossless` (`measure` -> `replay` -> a
measured comparison) -> `report` -> the bundle's manifest. docs/guide/bound-on-change.md states the guarantee.
"""

import os
from typing import Any

from tide_export.bundle.opened import Bundle
from tide_export.bundle.store import replace_manifest
from tide_export.common.progress import stage
from tide_export.errors import BundleError, ConfigError, TuneError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.tuning.exits import tune_exits
from tide_export.tuning.lossless import tune_lossless
from tide_export.tuning.prompts import draw_prompts
from tide_export.tuning.report import ExitReport, LosslessReport
from tide_export.tuning.request import ExitRequest, LosslessRequest, make_request


def tune(
    bundle: str | os.PathLike[str], dataset: str, *, mode: str = "exit", **options: Any
) -> ExitReport | LosslessReport:
    """Tunes a bundle for one mode on a dataset, and stores the result in its manifest.

    Mode `exit` finds the thresholds that save most layers while at most a share epsilon of tokens is changed, on
    average over prompts drawn like the tested ones, with probability 1 - delta over these; and whose change of
    perplexity on these is at most perplexity_epsilon. If no candidate passes, the bundle exits nowhere.

    Mode `lossless` finds the drafting that gives most tokens per second on this machine; off if none is faster.

    Args:
        bundle: the folder; its manifest is replaced atomically at the end.
        dataset: SPEC of the text.
        mode: "exit" or "lossless".
        options: the fields of `ExitRequest` (epsilon and delta are required) or of `LosslessRequest`.

    Raises:
        ConfigError: a number is out of range, or an option belongs to the other mode.
        TuneError: there are too few prompts to certify epsilon and delta (raised before the graph runs), fewer than
            two documents that the routers have not seen, or no checkpoint that may exit; or lossless mode gave another
            token than full depth.
        BundleError: the bundle is unusable, was made from other weights, cannot be written to, or changed meanwhile.
        DatasetError, ModelError: as `Documents` and `load_model` raise them.
    """
    request = make_request(mode, {"dataset": dataset, **options})
    engine = load(bundle, provider="cpu", threads=request.threads)
    _check_bundle(engine, request)
    with stage("reading prompts"):
        prompts = draw_prompts(
            dataset,
            BundleTokenizer(engine.bundle),
            engine.manifest.calibration,
            length=request.drawn_length,
            count=request.prompts,
            per_document=request.prompts_per_document,
            seed=request.seed,
        )
    report: ExitReport | LosslessReport
    if isinstance(request, ExitRequest):
        report = tune_exits(engine, request, prompts)
    else:
        report = tune_lossless(engine, request, prompts)
    if not request.dry_run:
        replace_manifest(engine.bundle, report.stored_in(engine.manifest))
    return report


def _check_bundle(engine: Engine, request: ExitRequest | LosslessRequest) -> None:
    """Checks that the bundle can be tuned as requested."""
    bundle, context = engine.bundle, engine.manifest.model.context_length
    if isinstance(request, ExitRequest):
        _check_exits(bundle, request)
        length, counted = request.drawn_length, "positions"
    else:
        length, counted = request.prompt_length + request.new_tokens, "new_tokens"
    if max(request.slots, default=0) > engine.max_batch_size:
        raise ConfigError(
            f"slots {max(request.slots)}: bundle {bundle.path} decodes at most {engine.max_batch_size} at once"
        )
    if context is not None and length > context:
        raise ConfigError(f"prompt_length and {counted} make {length} tokens but the model's context holds {context}")
    if not request.dry_run and not os.access(bundle.path, os.W_OK):
        raise BundleError(f"bundle {bundle.path} cannot be written to: the result could not be stored")


def _check_exits(bundle: Bundle, request: ExitRequest) -> None:
    manifest = bundle.manifest
    if not manifest.checkpoints:
        raise TuneError(f"bundle {bundle.path} has no checkpoints: there are no thresholds to tune")
    min_layers = manifest.min_layers if request.min_layers is None else request.min_layers
    if manifest.checkpoints[-1] < min_layers:
        raise TuneError(
            f"bundle {bundle.path}: min_layers is {min_layers} but the last checkpoint comes after layer "
            f"{manifest.checkpoints[-1]}, so nothing may exit; give a lower --min-layers"
        )
    if request.model is not None:
        from tide_export.model.source import load_model  # needs PyTorch

        source = load_model(request.model, trust_remote_code=request.trust_remote_code)
        bundle.require_weights(source.weights_sha256, request.model)
