"""Fits the routers of all checkpoints."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tide_export.calibration.collect import Sample
from tide_export.calibration.config import TideConfig
from tide_export.calibration.fit_router import FittedRouter, LabelledHidden, fit_router
from tide_export.calibration.labels import likeliest, may_exit, most_frequent, normalize
from tide_export.calibration.parallel import in_parallel
from tide_export.common.progress import stage
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel
from tide_export.routers.router import Lens
from tide_export.routers.router_set import RouterSet

logger = logging.getLogger("tide_export")


def fit_checkpoints(
    source: SourceModel,
    config: TideConfig,
    checkpoints: Sequence[int],
    train: Sample,
    validation: Sample,
    fitted_lenses: Mapping[int, Lens],
) -> tuple[RouterSet, dict[int, dict[str, Any]]]:
    """Fits the routers of `checkpoints`; drops a checkpoint whose labels are all of one class.

    Args:
        train, validation: samples, whose hidden states at a checkpoint are freed after use.
        fitted_lenses: checkpoint -> its lens, for those that have one.

    Returns:
        The routers without provenance, and the report of each checkpoint.

    Raises:
        CalibrationError: no checkpoint is left, or a loss is not a number.
    """
    samples = (train, validation)
    lenses: dict[int, Lens] = {}
    labels: dict[int, list[torch.Tensor]] = {}
    reports: dict[int, dict[str, Any]] = {}

    def fit(layers: int) -> FittedRouter:
        for_training, for_validation = (
            LabelledHidden(normalize(source, sample.raw.pop(layers), lenses.get(layers)), truth)
            for sample, truth in zip(samples, labels[layers], strict=True)
        )
        return fit_router(for_training, for_validation, config, layers, shortlist)

    with stage("fitting routers", total=2 * len(checkpoints)) as advance:
        full_tokens = [likeliest(source, normalize(source, sample.raw[source.num_layers])) for sample in samples]
        shortlist = _shortlist(source, config, full_tokens[0])
        for layers in checkpoints:
            lens = fitted_lenses.get(layers)
            truth = [
                may_exit(source, sample, config, layers, normalize(source, sample.raw[layers], lens), tokens)
                for sample, tokens in zip(samples, full_tokens, strict=True)
            ]
            if _is_one_class(layers, truth[0], config.label):
                advance(1)
            else:
                labels[layers] = truth
                if lens is not None:
                    lenses[layers] = lens
            advance(1)
        routers = {}
        for layers, fitted in zip(labels, in_parallel(source, fit, labels), strict=True):
            routers[layers] = fitted.router
            reports[layers] = fitted.report
            advance(1)
    if not routers:
        raise CalibrationError(
            f"no checkpoint of {', '.join(map(str, checkpoints))} is left: by the {config.label} label either no token "
            "may exit there or every one may, so there is nothing to learn"
        )
    return RouterSet(routers, {}, lenses), reports


def _shortlist(source: SourceModel, config: TideConfig, tokens: torch.Tensor) -> torch.Tensor | None:
    """Returns the head's rows [N, D'] of the N most frequent tokens; None for routers of TIDE's form.

    Args:
        tokens: the full model's likeliest tokens on training text, int64 [n].
    """
    if config.router_shortlist == 0:
        return None
    rows = source.head_rows()
    if rows is None:
        logger.warning("the head of %s is not a matrix: its routers have no shortlist", source.architecture)
        return None
    return rows[most_frequent(tokens, len(rows), max(2, config.router_shortlist))].contiguous()


def _is_one_class(layers: int, labels: torch.Tensor, label: str) -> bool:
    """Returns whether no token or every token may exit at a checkpoint, and warns that it is dropped."""
    if bool(labels.any()) and not bool(labels.all()):
        return False
    logger.warning(
        "checkpoint %d is dropped: %s token (of %d) may exit here by the %s label, so a router has nothing to learn",
        layers,
        "every" if bool(labels.any()) else "no",
        len(labels),
        label,
    )
    return True
