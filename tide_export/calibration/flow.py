"""Calibration: from a frozen model and text to one fitted router per checkpoint, with a record of how good they are.

First stage of the pipeline after loading the model:
texts -> sequences -> split -> (checkpoints) -> collect -> lenses -> labels -> routers -> evaluate.
Three splits, between documents: routers and lenses are fitted on the first, stopped and scaled on the second, and
measured on the third.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tide_export.calibration.assessment import Assessment, Evaluation
from tide_export.calibration.collect import Sample, collect
from tide_export.calibration.distributed import Processes
from tide_export.calibration.evaluate import count_costs, evaluate, exit_states, read_examples
from tide_export.calibration.fit_lens import fit_lens
from tide_export.calibration.fit_router import Fitted, Labelled, assess, fit_router
from tide_export.calibration.labels import may_leave, normalize, top1
from tide_export.calibration.parallel import in_parallel
from tide_export.calibration.placement import Layerwise, choose_checkpoints, look_layer_by_layer
from tide_export.calibration.split import Split, split_sequences
from tide_export.config import TideConfig
from tide_export.data.documents import Documents
from tide_export.data.sequences import TokenSequence, load_tokenizer, read_sequences
from tide_export.errors import CalibrationError
from tide_export.model.source import SourceModel
from tide_export.progress import stage
from tide_export.routers.router import Lens, Router
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.version import __version__

logger = logging.getLogger("tide_export")

__all__ = ["Calibration", "Documents", "TokenSequence", "calibrate", "load_tokenizer", "read_sequences"]

HELD_SHARE = (
    0.25  # tokens kept of the validation and of the test split, each, as a share of those of the training split
)


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` gives: the routers, and all that was measured of them on documents held out."""

    routers: RouterSet
    assessment: Assessment


def calibrate(
    source: SourceModel, tokenizer: PreTrainedTokenizerBase, config: TideConfig, cache: Path | None = None
) -> Calibration | None:
    """Fits the routers and lenses of `source` on `config.calibration_dataset`; None in any process but the main one.

    The routers' provenance holds `model`, `weights_sha256`, `num_layers`, `hidden_size` (of the normalized state);
    `dataset`, `dataset_sha256` (of the text read), `document_hashes`, `documents`, `sequences`, `tokens`; `split` and
    `label`, `exit_strategy`; `config`, `versions`; and `report`, per checkpoint (a string) what `fit.assess` found on
    the test split, with `lens` beside it where there is one.

    Args:
        cache: a folder for the hidden states, instead of memory; a run that was killed goes on from there.

    Raises:
        ConfigError: no such checkpoints in this model.
        DatasetError: the dataset cannot be read or holds no text.
        CalibrationError: too little text, a tokenizer of another model, NaN in a hidden state, no checkpoint left.
    """
    if config.checkpoints != "auto":
        config.resolve_checkpoints(source.num_layers)  # or its mistake would be found after the reading
    documents = Documents(config.calibration_dataset)
    sequences = _read(source, tokenizer, config, documents)
    split = split_sequences(sequences, config.validation_fraction, config.test_fraction, config.seed)
    if split.unit == "sequences":
        logger.warning(
            "dataset %r has too few documents to validate on ones of their own: its last sequences are taken instead, "
            "and the report will look better than new text would",
            documents.spec,
        )
    checkpoints = _checkpoints(source, config, split)
    samples = _collect(source, config, split, checkpoints, cache)
    looked = look_layer_by_layer(source, split.test, config)  # here: all processes share what runs the model
    if not Processes.current().main:
        return None

    routers, lenses, records = _fit(
        source, config, checkpoints, {name: samples[name] for name in ("train", "validation")}
    )
    if not routers:
        raise CalibrationError(
            f"no checkpoint of {', '.join(map(str, checkpoints))} is left: by the {config.label} label either no token "
            "may leave there or every one may, so there is nothing to learn"
        )

    with stage("measuring the exits on held-out text", total=1.0) as advance:
        evaluation = evaluate(source, RouterSet(routers, {}, lenses), samples["test"], config, advance)
    report = _report(source, RouterSet(routers, {}, lenses), samples["test"], evaluation, config, records)
    fitted_set = RouterSet(
        routers,
        {
            "model": source.name,
            "weights_sha256": source.weights_sha256,
            "num_layers": source.num_layers,
            "hidden_size": source.normalized_size,
            "dataset": documents.spec,
            "dataset_sha256": documents.sha256,
            "document_hashes": documents.hashes,
            "documents": len({sequence.document for sequence in sequences}),
            "sequences": len(sequences),
            "tokens": sum(sample.seen for sample in samples.values()),
            "split": split.unit,
            "label": config.label,
            "exit_strategy": config.exit_strategy,
            "config": config.model_dump(mode="json"),
            "versions": {"tide_export": __version__}
            | {package: version(package) for package in ("torch", "transformers", "datasets")},
            "report": report,
        }
        | ({} if source.quantized is None else {"quantization": asdict(source.quantized.settings)}),
        lenses,
    )
    return Calibration(fitted_set, _assess(source, tokenizer, fitted_set, split, evaluation, looked, config))


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


def _checkpoints(source: SourceModel, config: TideConfig, split: Split) -> tuple[int, ...]:
    if config.checkpoints != "auto":
        return config.resolve_checkpoints(source.num_layers)
    looked = look_layer_by_layer(source, split.train, config)
    chosen = choose_checkpoints(looked, count_costs(source, config), config.min_layers)
    logger.info("checkpoints auto: after %s of %d layers", ", ".join(map(str, chosen)), source.num_layers)
    return chosen


def _collect(
    source: SourceModel, config: TideConfig, split: Split, checkpoints: Sequence[int], cache: Path | None
) -> dict[str, Sample]:
    """The samples of the three splits by name."""
    layers = [*checkpoints, source.num_layers]
    kept = config.tokens_kept(source.hidden_size, len(layers))
    held = max(1, round(kept * HELD_SHARE))
    return {
        name: collect(
            source,
            sequences,
            layers,
            config,
            capacity,
            f"running the model on {name} text",
            None if cache is None else cache / name,
        )
        for name, sequences, capacity in (
            ("train", split.train, kept),
            ("validation", split.validation, held),
            ("test", split.test, held),
        )
    }


def _fit(
    source: SourceModel, config: TideConfig, checkpoints: Sequence[int], samples: dict[str, Sample]
) -> tuple[dict[int, Router], dict[int, Lens], dict[int, dict[str, Any]]]:
    """The routers and lenses of the checkpoints that are left, and a record of each.

    Args:
        samples: `train` and `validation`; their states at the checkpoints are given up as they are used.
    """
    routers: dict[int, Router] = {}
    lenses: dict[int, Lens] = {}
    records: dict[int, dict[str, Any]] = {}
    labels: dict[int, dict[str, torch.Tensor]] = {}

    def states(layers: int, raw: torch.Tensor) -> torch.Tensor:
        return exit_states(source, RouterSet({}, {}, lenses), layers, raw)

    def fit(layers: int) -> Fitted:
        train, validation = (
            Labelled(states(layers, samples[name].raw.pop(layers)), labels[layers][name])
            for name in ("train", "validation")
        )
        return fit_router(train, validation, config, layers, shortlist)

    title = "fitting lenses and routers" if config.exit_strategy == "lens" else "fitting routers"
    with stage(title, total=2 * len(checkpoints)) as advance:
        teacher = {name: top1(source, normalize(source, s.raw[source.num_layers])) for name, s in samples.items()}
        shortlist = _shortlist(source, config, teacher["train"])
        for layers in checkpoints:
            record: dict[str, Any] = {}
            if config.exit_strategy == "lens":
                lenses[layers], record["lens"] = fit_lens(
                    source, samples["train"], samples["validation"], config, layers
                )
            found = {
                name: may_leave(source, sample, config, layers, states(layers, sample.raw[layers]), teacher[name])
                for name, sample in samples.items()
            }
            if _tells_nothing_apart(layers, found["train"], config.label):
                lenses.pop(layers, None)
                advance(1)
            else:
                labels[layers], records[layers] = found, record
            advance(1)
        for layers, fitted in zip(labels, in_parallel(source, fit, labels), strict=True):
            routers[layers] = fitted.router
            records[layers] = fitted.report | records[layers]
            advance(1)
    return routers, lenses, records


def _shortlist(source: SourceModel, config: TideConfig, said: torch.Tensor) -> torch.Tensor | None:
    """The head's rows [N, D'] for the N tokens that the full model says most often; None for routers of TIDE's form.

    Args:
        said: what it says on training text, int64 [n].
    """
    if config.router_shortlist == 0:
        return None
    rows = source.head_rows()
    if rows is None:
        logger.warning("the head of %s is no matrix: its routers do without a shortlist", source.architecture)
        return None
    counts = torch.bincount(said, minlength=len(rows))
    most = counts.sort(descending=True, stable=True).indices[: max(2, config.router_shortlist)]
    return rows[most].contiguous()


def _report(
    source: SourceModel,
    routers: RouterSet,
    test: Sample,
    evaluation: Evaluation,
    config: TideConfig,
    records: dict[int, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Per checkpoint (a string) its record and what the test split says; told in the log as well."""
    report: dict[str, dict[str, Any]] = {}
    for k, layers in enumerate(routers.checkpoints):
        labels = torch.from_numpy(evaluation.labels[:, k].copy())
        held = Labelled(exit_states(source, routers, layers, test.raw[layers]), labels)
        report[str(layers)] = records[layers] | assess(routers.routers[layers], held, config.exit_threshold)
        _tell(layers, report[str(layers)])
    return report


def _assess(
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    routers: RouterSet,
    split: Split,
    evaluation: Evaluation,
    looked: Layerwise,
    config: TideConfig,
) -> Assessment:
    thresholds = tuple(config.exit_threshold if c >= config.min_layers else MAX_THRESHOLD for c in routers.checkpoints)
    folder = Path(source.name)
    return Assessment(
        model=folder.resolve().name if folder.is_dir() else source.name,
        thresholds=thresholds,
        evaluation=evaluation,
        convergence=looked.convergence(),
        examples=read_examples(source, tokenizer, routers, split.test, thresholds),
        costs=count_costs(source, config),
        provenance=routers.provenance,
    )


def _tells_nothing_apart(layers: int, labels: torch.Tensor, label: str) -> bool:
    """Whether a checkpoint is dropped because no token or every token may leave there; says so."""
    if bool(labels.any()) and not bool(labels.all()):
        return False
    logger.warning(
        "checkpoint %d is dropped: %s token (of %d) may leave here by the %s label, so a router has nothing to learn",
        layers,
        "every" if bool(labels.any()) else "no",
        len(labels),
        label,
    )
    return True


def _tell(layers: int, report: dict[str, Any]) -> None:
    """One line per checkpoint in the log."""
    precision, recall = (
        f"{100 * value:.1f} %" if value is not None else "n/a" for value in (report["precision"], report["recall"])
    )
    logger.info(
        "checkpoint %d: %.1f %% of %d held-out tokens may leave; with score > %.2f %.1f %% do, precision %s, "
        "recall %s (accuracy at 0.5: %.1f %%; loss %.3f, without a router %.3f; calibration error %.3f)",
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
        report["ece"],
    )
