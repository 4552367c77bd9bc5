"""Calibration: from a frozen model and text to one fitted router per checkpoint, with a record of how it was made.

First stage of the pipeline after loading the model:
texts -> sequences -> split -> collect (reservoir, labels) -> fit -> `RouterSet`.
"""

import logging
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tide_export import __version__
from tide_export.calibrate.collect import collect
from tide_export.calibrate.fit import fit_router
from tide_export.calibrate.sequences import TokenSequence, load_tokenizer, read_sequences
from tide_export.calibrate.split import split_sequences
from tide_export.calibrate.texts import Documents
from tide_export.config import TideConfig
from tide_export.model import SourceModel
from tide_export.progress import stage
from tide_export.routers import Router, RouterSet

logger = logging.getLogger("tide_export")

__all__ = ["Documents", "TokenSequence", "calibrate", "load_tokenizer", "read_sequences"]


def calibrate(source: SourceModel, tokenizer: PreTrainedTokenizerBase, config: TideConfig) -> RouterSet:
    """Fits the routers of `source` on `config.calibration_dataset`.

    The result's provenance holds `model`, `weights_sha256`, `num_layers`, `hidden_size` (of the normed state);
    `dataset`, `dataset_sha256` (of the text read), `documents`, `sequences`, `tokens`; `split` and `label`; `config`,
    `versions`; and `report`, per checkpoint (a string) what `fit.assess` found on the validation split.

    Raises:
        ConfigError: no such checkpoints in this model.
        DatasetError: the dataset cannot be read or holds no text.
        CalibrationError: too little text, a tokenizer of another model, NaN in a hidden state.
    """
    checkpoints = config.resolve_checkpoints(source.num_layers)
    documents = Documents(config.calibration_dataset)
    sequences = _read(source, tokenizer, config, documents)
    split = split_sequences(sequences, config.validation_fraction, config.seed)
    if split.unit == "sequences":
        logger.warning(
            "dataset %r has too few documents to validate on ones of their own: its last sequences are taken instead, "
            "and the report will look better than new text would",
            documents.spec,
        )

    kept = config.calibration_tokens_kept
    train = collect(source, split.train, checkpoints, config, kept, "running the model on training text")
    kept = max(1, round(kept * config.validation_fraction))
    validation = collect(source, split.validation, checkpoints, config, kept, "running the model on validation text")

    routers: dict[int, Router] = {}
    report: dict[str, dict[str, Any]] = {}
    with stage("fitting routers", total=len(checkpoints)) as advance:
        for layers in checkpoints:
            fitted = fit_router(
                (train.features[layers], train.labels[layers]),
                (validation.features[layers], validation.labels[layers]),
                config,
                layers,
            )
            routers[layers], report[str(layers)] = fitted.router, fitted.report
            advance(1)
    for layers in checkpoints:
        _tell(layers, report[str(layers)], train.labels[layers], config.label)

    return RouterSet(
        routers,
        {
            "model": source.name,
            "weights_sha256": source.weights_sha256,
            "num_layers": source.num_layers,
            "hidden_size": source.normed_size,
            "dataset": documents.spec,
            "dataset_sha256": documents.sha256,
            "documents": len({sequence.document for sequence in sequences}),
            "sequences": len(sequences),
            "tokens": train.seen + validation.seen,
            "split": split.unit,
            "label": config.label,
            "config": config.model_dump(mode="json"),
            "versions": {"tide_export": __version__}
            | {package: version(package) for package in ("torch", "transformers", "datasets")},
            "report": report,
        },
    )


def _read(
    source: SourceModel, tokenizer: PreTrainedTokenizerBase, config: TideConfig, documents: Documents
) -> list[TokenSequence]:
    length = min(config.calibration_length, source.context_length or config.calibration_length)
    sequences: list[TokenSequence] = []
    with stage("reading text", total=config.calibration_samples) as advance:
        for sequence in read_sequences(documents, tokenizer, length, config.calibration_samples):
            sequences.append(sequence)
            advance(1)
    return sequences


def _tell(layers: int, report: dict[str, Any], labels: torch.Tensor, label: str) -> None:
    """One line per checkpoint in the log; a warning where there was nothing to tell apart."""
    if not bool(labels.any()) or bool(labels.all()):
        share = "every" if bool(labels.any()) else "no"
        logger.warning(
            "checkpoint %d: %s token (of %d) may leave here by the %s label: its router learns to answer always alike",
            layers,
            share,
            len(labels),
            label,
        )
    precision, recall = (
        f"{100 * value:.1f} %" if value is not None else "n/a" for value in (report["precision"], report["recall"])
    )
    logger.info(
        "checkpoint %d: %.1f %% of %d validation tokens may leave; with score > %.2f %.1f %% do, precision %s, "
        "recall %s (accuracy at 0.5: %.1f %%; loss %.3f, without a router %.3f)",
        layers,
        100 * report["positive_rate"],
        report["tokens"],
        report["threshold"],
        100 * report["exit_rate"],
        precision,
        recall,
        100 * report["accuracy"],
        report["loss"],
        report["base_loss"],
    )
