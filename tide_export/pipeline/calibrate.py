"""Calibration as a stage of the flow and as a command of its own, which writes a router file."""

import logging
import os
from pathlib import Path
from typing import Any

from tide_export.bundle.file_names import REPORT_FILE
from tide_export.calibration import flow as calibration
from tide_export.calibration.config import TideConfig
from tide_export.common.files import check_writable, failure
from tide_export.common.progress import stage
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ConfigError
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.preflight import find_text, loop_defaults, planned_checkpoints
from tide_export.pipeline.request import ExportRequest
from tide_export.report.write import check_report_path, headline, write_report
from tide_export.routers.router_set import RouterSet
from tide_export.trace.attention.masks import layer_masks
from tide_export.trace.recurrence import refuse_unknown_state

logger = logging.getLogger("tide_export")


def calibrate(
    model: str,
    output: str | os.PathLike[str],
    config: TideConfig | None = None,
    *,
    report: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> RouterSet | None:
    """Calibrates routers for `model` and writes them to `output` (safetensors).

    Args:
        model: folder, hub id or GGUF file.
        report: a .html file for the report of the gains; a picture of the same name is written beside it.
        cache: folder that keeps hidden states, from which a killed run resumes.
        device_map: "auto" for a model larger than one device.
        trust_remote_code: run Python code from the model's folder (see `model.source.load_model`).

    Returns:
        The routers; None in every process but the main one.

    Raises:
        TideError: a stage failed; nothing is written.
    """
    config, target = config or TideConfig(), Path(output)
    if config.checkpoints == "none":
        raise ConfigError("routers are fitted at checkpoints: --checkpoints none is for export alone")
    _check_router_path(target)
    if report is not None:
        check_report_path(Path(report))
    find_text(config)
    with stage("loading the model"):
        source = load_model(model, device_map=device_map, trust_remote_code=trust_remote_code)
    refuse_unknown_state(source)
    layer_masks(source.model, source.structure.layers)
    config = loop_defaults(source, config)
    planned_checkpoints(config, source.num_layers)
    tokenizer = load_tokenizer(model, trust_remote_code)
    made = calibration.calibrate(source, tokenizer, config, None if cache is None else Path(cache))
    if made is None:
        return None
    made.routers.save(target)
    logger.info("wrote %s: %s", target, made.routers.sizes())
    logger.info("%s", headline(made.assessment))
    if report is not None:
        with stage("writing the report"):
            write_report(made.assessment, Path(report))
    return made.routers


def calibrate_for_bundle(source: SourceModel, request: ExportRequest, folder: Path) -> RouterSet:
    """Calibrates routers of `source` and writes the report, if `request` has one, into `folder`."""
    made = calibration.calibrate(source, load_tokenizer(request.model, request.trust_remote_code), request.config)
    assert made is not None, "preflight refuses several processes"
    logger.info("%s", headline(made.assessment))
    if request.report:
        with stage("writing the report"):
            write_report(made.assessment, folder / REPORT_FILE)
    return made.routers


def _check_router_path(target: Path) -> None:
    """Checks before the calibration that the router file can be written."""
    folder = target.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write routers to {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise ConfigError(f"cannot write routers to {target}: it is a folder")
    try:
        check_writable(target)
    except OSError as error:
        raise ConfigError(f"cannot write routers to {target}: {failure(error, folder)}") from None
