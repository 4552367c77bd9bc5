"""The stages of an export: load, quantize, trace, cut, calibrate, compose, lower, write, build, check.

Routers are calibrated after the trace, so that a model that cannot be traced is refused before hours of calibration.
Stages do not call each other: each gets all it needs from here and can be read and tested alone.
"""

from dataclasses import replace
from pathlib import Path

from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.common.memory import return_free_memory
from tide_export.common.progress import stage
from tide_export.compose.exit_shares import with_exit_shares
from tide_export.model.failures import explained
from tide_export.model.source import load_model
from tide_export.pipeline.calibrate import calibrate_for_bundle
from tide_export.pipeline.contents import make_manifest, save_tokenizer, write_contents, write_networks
from tide_export.pipeline.draft_head import compose, fusion, given_head, measure_drafts, write_drafter
from tide_export.pipeline.pieces import trace_and_cut
from tide_export.pipeline.preflight import check_source, for_model, given_routers, warn_if_nothing_exits
from tide_export.pipeline.request import ExportRequest, takes_request
from tide_export.pipeline.weights import choose_weights, explain_weights, prepare_weights
from tide_export.plans.build import build_plans
from tide_export.plans.compare import check_fp8_plans
from tide_export.routers.model_gate import MODEL_GATE, gate_routers
from tide_export.tuning.auto import measure_auto
from tide_export.verify.export_gate import check_export, model_references
from tide_export.verify.int8_kv import rounded_kv
from tide_export.verify.references import References


@takes_request
def export(request: ExportRequest) -> Path:
    """Exports a model to a bundle and returns the bundle's path: `export(model, output, weights="int4")`.

    Args:
        request: an `ExportRequest`, or its fields as positional and keyword arguments.

    Raises:
        TideError: a stage failed; `output` is unchanged.
    """
    with writing_bundle(request.output, overwrite=request.overwrite) as folder:
        manifest, references = _write_graphs(request, folder)
        return_free_memory()  # the model's, for building and checking plans
        if request.engines and request.flavour is not None:
            plans = build_plans(folder, manifest, request.flavour, request.plugin_library)
            manifest = replace(manifest, engines=plans)
        manifest = write_manifest(folder, manifest)
        if request.validate:
            with stage("checking the graph against the model"):
                check_export(folder, manifest, references)
                check_fp8_plans(folder, request.plugin_library)
        auto = measure_auto(folder, manifest, request.config.epsilon, request.config.perplexity_epsilon)
        measure_drafts(folder, write_manifest(folder, replace(manifest, auto=auto), manifest.files), request)
    return Path(request.output)


def _write_graphs(request: ExportRequest, folder: Path) -> tuple[Manifest, list[References]]:
    """Runs the stages that need the model; returns the manifest so far and `check_export`'s references."""
    routers = given_routers(request)
    with stage("loading the model"):
        source = load_model(request.model, **request.loading)
    request = for_model(source, request)
    if request.routers == MODEL_GATE:
        routers = gate_routers(source)
    asked, request = request, choose_weights(source, request)
    length, checkpoints = check_source(source, request, routers, folder)
    head = given_head(source, request, length)
    explain_weights(source, asked)
    prepare_weights(source, request)
    pieces = trace_and_cut(source, request, checkpoints, length, head.layers)
    if routers is None:
        routers = calibrate_for_bundle(source, request, folder)
        if routers.checkpoints != checkpoints:  # chosen by the text (`auto`), or some were dropped
            pieces = trace_and_cut(source, request, routers.checkpoints, length, head.layers)
    elif request.routers != MODEL_GATE:
        routers.check_quantization(source, request.routers or "")
    traced = pieces
    if routers.cumulative:
        pieces = with_exit_shares(pieces, routers.arrays())
    warn_if_nothing_exits(routers.checkpoints, request.config.min_layers)
    with stage("composing the graph"), explained(source.model, "be composed into a graph that skips layers"):
        graph = compose(source, request, pieces, routers, head)
    manifest = make_manifest(source, routers, request.config, pieces, graph, length, request.half)
    references: list[References] = []
    if request.validate:
        with stage("running the model for the references the graph must give"), rounded_kv(source, manifest):
            references = model_references(source, routers, manifest, graph)
    with stage("writing the weights"):
        write_contents(folder, graph, manifest, pieces, routers, *fusion(source, request, head))
        save_tokenizer(request, folder)
        manifest = write_networks(folder, request, manifest, traced, routers, source)
        manifest = write_drafter(folder, manifest, head)
    source.release()
    return manifest, references
