"""The main flow, one line a stage: load, quantize, calibrate, trace, cut, compose, lower, write, check.

`tide-export export` and `tide-export calibrate` call these two functions; library users may too. Everything a stage
needs is handed over here, so that each stage can be read and tested alone.
"""

import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from tide_export.bundle.manifest import NETWORK_PRECISIONS, PROPAGATE, TARGETS, Manifest, Quantization
from tide_export.bundle.profiles import BATCH_SIZE, check_batch_size
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.calibration.flow import calibrate
from tide_export.compose.cut import Pieces, cut
from tide_export.compose.propagate import compose_propagating
from tide_export.compose.step_graph import compose
from tide_export.config import TideConfig
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.engines.build import build_engines, require_builder
from tide_export.errors import ConfigError, UnsupportedModelError
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.lower.onnxruntime.packed import save_batch_networks
from tide_export.lower.tensorrt.lower import check_operators, networks_for_tensorrt
from tide_export.model.source import SourceModel, load_model
from tide_export.names import REPORT_FILE, ROUTERS_FILE
from tide_export.pipeline.contents import context_length, make_manifest, save_graph, save_tokenizer
from tide_export.progress import stage
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.settings import CALIBRATED, QUANTIZED, quantization_settings
from tide_export.report.write import check_report_path, headline, write_report
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.tensorrt.flavours import FLAVOURS, Flavour
from tide_export.runtime.tensorrt.plugins import NONE, plugins_to_build_with
from tide_export.trace.tracer import trace
from tide_export.verify.export_gate import ask_model, check_export
from tide_export.verify.parity import Answers

logger = logging.getLogger("tide_export")

QUANTIZATION_SEQUENCES = 64  # that a calibrated quantization reads


def calibrate_to_file(
    model: str,
    output: str | os.PathLike[str],
    config: TideConfig,
    *,
    report: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device_map: str | None = None,
) -> RouterSet | None:
    """Calibrates routers for `model` and writes them to `output` (safetensors).

    Args:
        report: a .html file for what the model gains by them; a picture of the same name goes beside it.
        cache: a folder to keep hidden states in, so that a run that is killed can go on.
        device_map: "auto" for a model larger than one device.

    Returns:
        The routers; None in all but the main one of several processes.

    Raises:
        TideError: of the stage that failed; nothing is written then.
    """
    target = Path(output)
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"cannot write routers to {target}: the folder {target.parent} does not exist")
    if report is not None:
        check_report_path(Path(report))
    source = _load(model, device_map)
    made = calibrate(source, load_tokenizer(model), config, None if cache is None else Path(cache))
    if made is None:
        return None
    made.routers.save(target)
    logger.info("wrote %s: %s", target, made.routers.sizes())
    logger.info("%s", headline(made.assessment))
    if report is not None:
        with stage("writing the report"):
            write_report(made.assessment, Path(report))
    return made.routers


def export(
    model: str,
    output: str | os.PathLike[str],
    *,
    routers: str | os.PathLike[str] | None = None,
    config: TideConfig | None = None,
    targets: Sequence[str] = ("onnxruntime",),
    weights: str = "fp32",
    quantization: str | None = None,
    block_size: int | None = None,
    accuracy_level: int | None = None,
    symmetric: bool | None = None,
    engines: bool = True,
    plugins: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    validate: bool = True,
    max_length: int | None = None,
    batch_size: int | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> Path:
    """Turns `model` (folder or hub id) into a bundle at `output` and gives its path.

    Args:
        routers: a router file; without one the routers are calibrated first.
        config: calibration settings and the bundle's default thresholds, min_layers, max_pending and
            compaction_threshold.
        targets: what the bundle is for: "onnxruntime", which every bundle is, and one of "tensorrt" and "tensorrt-rtx",
            for which it also gets segment networks and engines.
        weights: "fp32"; for ONNX Runtime alone "int8" or "int4", of the graph's matrices; for TensorRT "fp16" or
            "bf16", of the segment networks, the graph being fp32.
        quantization, block_size, accuracy_level, symmetric: of int8 and int4, as `quantize.settings` takes them.
        engines: build the engines; without, the bundle has the networks alone and `engines.rebuild` adds engines.
        plugins: the library of plugins that engines for tensorrt are built with, or "none"; None: the one that
            `runtime.tensorrt.plugins` finds, if any.
        overwrite: replace a bundle already there. It stays untouched until the new one is complete.
        validate: compare the finished graph with the source model (`verify.export_gate`) before it is put in place.
        max_length: longest sequence the bundle can hold, in tokens; the model's own context by default.
        batch_size: for TensorRT: sequences that may be decoded together; None: `bundle.profiles.BATCH_SIZE`.
        device_map: "auto" (or accelerate's map by module) for a model larger than the memory: its layers stay on other
            devices or on disk, and each weight is read when it is written.

    Raises:
        TideError: of the stage that failed; nothing is left at `output` then.
    """
    config = config or TideConfig()
    settings = quantization_settings(weights, quantization, block_size, accuracy_level, symmetric)
    flavour = _flavour(targets, weights)
    propagates = config.kv_cache_strategy == PROPAGATE
    if flavour is not None and propagates:
        raise ConfigError(f"kv_cache_strategy propagate is for target onnxruntime, not {flavour.name}")
    if propagates and (idle := {"max_pending", "compaction_threshold"} & config.model_fields_set):
        raise ConfigError(f"{min(idle)} is for kv_cache_strategy exact: where K/V are propagated nothing waits")
    if batch_size is not None and flavour is None:
        raise ConfigError("batch_size is for targets tensorrt and tensorrt-rtx: onnxruntime takes batches as they come")
    rows = check_batch_size(BATCH_SIZE if batch_size is None else batch_size)
    library = None
    if flavour is not None and engines:
        library = plugins_to_build_with(flavour, require_builder(flavour), plugins)  # before the work
    elif plugins not in (None, NONE):
        raise ConfigError(
            "--plugins is for building engines of target tensorrt, and none are built here: leave it away"
        )
    with writing_bundle(output, overwrite=overwrite) as folder:
        request = _Request(model, routers, config, flavour, weights, settings, validate, max_length, rows, device_map)
        manifest, answers = _write_graphs(folder, request)
        gc.collect()  # of the model nothing is left now: engines are built and checked in the room it had
        if flavour is not None and engines:
            manifest = replace(manifest, engines=build_engines(folder, manifest, flavour, library))
        manifest = write_manifest(folder, manifest)
        if validate:
            with stage("checking the graph against the model"):
                check_export(folder, manifest, answers)
    return Path(output)


@dataclass(frozen=True)
class _Request:
    """What `export` was asked for, as far as it takes the model; see there."""

    model: str
    routers: str | os.PathLike[str] | None
    config: TideConfig
    flavour: Flavour | None
    weights: str
    quantization: Quantization | None
    validate: bool
    max_length: int | None
    rows: int
    device_map: str | dict[str, Any] | None

    @property
    def propagates(self) -> bool:
        return self.config.kv_cache_strategy == PROPAGATE


def _write_graphs(folder: Path, request: _Request) -> tuple[Manifest, list[Answers]]:
    """Everything that needs the source model, which is in memory as long as this runs and no longer.

    Returns:
        The manifest so far, and what the graphs must say, for `check_export`; nothing of it without `validate`.
    """
    given = RouterSet.load(request.routers) if request.routers is not None else None
    source = _load(request.model, request.device_map)
    length = context_length(source, request.max_length)
    if given is not None:
        given.check(source, request.routers or "")
    if request.quantization is not None:
        quantize_model(source, request.quantization, _texts(source, request))
    if given is not None:
        given.check_quantization(source, request.routers or "")
        fitted, pieces = given, None
    else:
        fitted, pieces = _calibrated(source, request, length, folder)
    _warn_if_nothing_exits(fitted.checkpoints, request.config.min_layers)

    if pieces is None or pieces.boundaries != (0, *fitted.checkpoints, source.num_layers):
        with stage("tracing the model"):
            traced = trace(source, fitted.checkpoints, length, every_layer=request.propagates)
        with stage("cutting the graph"):
            pieces = cut(traced, length)
    lower = partial(lower_for_onnxruntime, quantized=source.quantized)
    with stage("composing the graph"):
        composing = compose_propagating if request.propagates else compose
        graph = lower(composing(pieces, fitted.arrays(), fitted.lens_arrays()))
    manifest = make_manifest(source, fitted, request.config, graph, length)
    answers: list[Answers] = []
    if request.validate:
        with stage("asking the model what the graph must say"):
            answers = ask_model(source, fitted, manifest, graph)
    with stage("writing the weights"):
        save_graph(graph, folder)
        _save_batch_networks(folder, pieces, fitted, lower)
        save_tokenizer(request.model, folder)
        fitted.save(folder / ROUTERS_FILE)
        if request.flavour is not None:
            networks = networks_for_tensorrt(pieces, fitted.arrays(), fitted.lens_arrays(), length, request.weights)
            networks.save(folder)
            info = networks.info(manifest, request.rows)
            manifest = replace(manifest, targets=("onnxruntime", request.flavour.name), networks=info)
    source.release()
    return manifest, answers


def _calibrated(source: SourceModel, request: _Request, length: int, folder: Path) -> tuple[RouterSet, Pieces | None]:
    """Routers fitted for the export, and the model cut at the checkpoints asked for where that had to be tried."""
    pieces = None
    if request.flavour is not None:  # what cannot be made for it is refused before hours of calibration
        with stage(f"looking at the model for {request.flavour.title}"):
            pieces = _trial(source, request.config, length)
    made = calibrate(source, load_tokenizer(request.model), request.config)
    if made is None:
        raise ConfigError("export runs in one process: calibrate with several, then export with --routers")
    logger.info("%s", headline(made.assessment))
    with stage("writing the report"):
        write_report(made.assessment, folder / REPORT_FILE)
    return made.routers, pieces


def _save_batch_networks(
    folder: Path, pieces: Pieces, routers: RouterSet, lower: Callable[[ir.Model], ir.Model]
) -> None:
    """Writes the networks for several sequences at once, or says why the bundle takes one prompt at a time."""
    try:
        save_batch_networks(folder, pieces, routers.arrays(), routers.lens_arrays(), lower=lower)
    except UnsupportedModelError as error:
        logger.warning("the bundle will take one prompt at a time: no networks for batches of this model: %s", error)


def _flavour(targets: Sequence[str], weights: str) -> Flavour | None:
    """The flavour of TensorRT among the targets, if any.

    Raises:
        ConfigError: unknown targets or weights, two flavours, or weights no target is made with.
    """
    for target in targets:
        if target not in TARGETS:
            raise ConfigError(f"target {target!r} is none of {', '.join(TARGETS)}")
    known = (*NETWORK_PRECISIONS, *QUANTIZED)
    if weights not in known:
        raise ConfigError(f"weights {weights!r} are not in this release: use one of {', '.join(known)}")
    flavours = sorted({target for target in targets if target in FLAVOURS})
    if len(flavours) > 1:
        raise ConfigError("a bundle holds the engines of one flavour: give target tensorrt or tensorrt-rtx, not both")
    if flavours and weights in QUANTIZED:
        raise ConfigError(
            f"weights {weights!r} are for target onnxruntime alone: {flavours[0]} takes fp32, fp16 or bf16"
        )
    if not flavours and weights not in ("fp32", *QUANTIZED):
        raise ConfigError(
            f"weights {weights!r} are for targets tensorrt and tensorrt-rtx: onnxruntime takes fp32, int8 or int4"
        )
    return FLAVOURS[flavours[0]] if flavours else None


def _trial(source: SourceModel, config: TideConfig, length: int) -> Pieces:
    """The model cut at the checkpoints that are asked for (in its middle, where they are to be found), if networks can
    be made of it.

    Raises:
        UnsupportedModelError, TraceError, GraphError: the model cannot be traced, cut, or made for TensorRT.
    """
    depth = source.num_layers
    middle = (depth // 2,) if depth > 1 else ()
    checkpoints = middle if config.checkpoints == "auto" else config.resolve_checkpoints(depth)
    pieces = cut(trace(source, checkpoints, length), length)
    check_operators(pieces)
    return pieces


def _texts(source: SourceModel, request: _Request) -> list[list[int]] | None:
    """What a calibrated quantization reads: the beginning of what the routers are calibrated on."""
    if request.quantization is None or request.quantization.method not in CALIBRATED:
        return None
    config = request.config
    length = min(config.calibration_length, source.context_length or config.calibration_length)
    count = min(config.calibration_samples, QUANTIZATION_SEQUENCES)
    found = read_sequences(config.calibration_dataset, load_tokenizer(request.model), length, count)
    return [sequence.ids.tolist() for sequence in found]


def _load(model: str, device_map: str | dict[str, Any] | None = None) -> SourceModel:
    with stage("loading the model"):
        return load_model(model, device_map=device_map)


def _warn_if_nothing_exits(checkpoints: tuple[int, ...], min_layers: int) -> None:
    if checkpoints[-1] < min_layers:
        logger.warning(
            "no token can exit by default: min_layers is %d but the last checkpoint comes after layer %d; "
            "lower --min-layers, or give min_layers when generating",
            min_layers,
            checkpoints[-1],
        )
