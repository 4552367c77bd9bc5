"""The main flow, one line a stage: load -> calibrate -> trace -> cut -> compose -> lower -> check -> bundle.

`tide-export export` and `tide-export calibrate` call these two functions; library users may too. Everything a stage
needs is handed over here, so that each stage can be read and tested alone.
"""

import logging
import os
from pathlib import Path

from tide_export.bundle import write_manifest, writing_bundle
from tide_export.calibrate import calibrate, load_tokenizer
from tide_export.config import TideConfig
from tide_export.errors import ConfigError
from tide_export.export_check import check_export
from tide_export.graph import compose, cut
from tide_export.lower import lower_for_onnxruntime
from tide_export.model import SourceModel, load_model
from tide_export.names import ROUTERS_FILE
from tide_export.package import context_length, make_manifest, save_graph, save_tokenizer
from tide_export.progress import stage
from tide_export.routers import RouterSet
from tide_export.trace import trace

logger = logging.getLogger("tide_export")


def calibrate_to_file(model: str, output: str | os.PathLike[str], config: TideConfig) -> RouterSet:
    """Calibrates routers for `model` and writes them to `output` (safetensors).

    Raises:
        TideError: of the stage that failed; nothing is written then.
    """
    target = Path(output)
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"cannot write routers to {target}: the folder {target.parent} does not exist")
    source = _load(model)
    routers = calibrate(source, load_tokenizer(model), config)
    routers.save(target)
    return routers


def export(
    model: str,
    output: str | os.PathLike[str],
    *,
    routers: str | os.PathLike[str] | None = None,
    config: TideConfig | None = None,
    weights: str = "fp32",
    overwrite: bool = False,
    validate: bool = True,
    max_length: int | None = None,
) -> Path:
    """Turns `model` (folder or hub id) into a bundle at `output` and gives its path.

    Args:
        routers: a router file; without one the routers are calibrated first.
        config: calibration settings and the bundle's default thresholds, min_layers and max_pending.
        weights: precision of the weights in the graph; "fp32".
        overwrite: replace a bundle already there. It stays untouched until the new one is complete.
        validate: run the finished graph against the source model on a few tokens before it is put in place.
        max_length: longest sequence the bundle can hold, in tokens; the model's own context by default.

    Raises:
        TideError: of the stage that failed; nothing is left at `output` then.
    """
    config = config or TideConfig()
    if weights != "fp32":
        raise ConfigError(f"weights {weights!r} are not in this release: use fp32")
    with writing_bundle(output, overwrite=overwrite) as folder:
        given = RouterSet.load(routers) if routers is not None else None
        source = _load(model)
        length = context_length(source, max_length)
        if given is not None:
            given.check(source, routers or "")
        fitted = given or calibrate(source, load_tokenizer(model), config)
        _warn_if_nothing_exits(fitted.checkpoints, config.min_layers)

        with stage("tracing the model"):
            traced = trace(source, fitted.checkpoints)
        with stage("cutting and composing the graph"):
            graph = lower_for_onnxruntime(compose(cut(traced, length), fitted.arrays()))
        with stage("writing the weights"):
            save_graph(graph, folder)
            save_tokenizer(model, folder)
            fitted.save(folder / ROUTERS_FILE)
        manifest = write_manifest(folder, make_manifest(source, fitted, config, graph, length))
        if validate:
            with stage("checking the graph against the model"):
                check_export(folder, manifest, source, fitted)
    return Path(output)


def _load(model: str) -> SourceModel:
    with stage("loading the model"):
        return load_model(model)


def _warn_if_nothing_exits(checkpoints: tuple[int, ...], min_layers: int) -> None:
    if checkpoints[-1] < min_layers:
        logger.warning(
            "no token can exit by default: min_layers is %d but the last checkpoint comes after layer %d; "
            "lower --min-layers, or give min_layers when generating",
            min_layers,
            checkpoints[-1],
        )
