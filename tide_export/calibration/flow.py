"""Calibration: from a source model and text to one fitted router per checkpoint, and measurements of their quality.

First stage of the pipeline after loading the model:
text -> sequences -> split -> checkpoints -> states (collect) -> lenses and routers (fit) -> evaluation.
The split is between documents: routers and lenses are fitted on its first part, stopped and scaled on the second, and
measured on the third.
"""

import logging
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tide_export.calibration.assessment import Assessment
from tide_export.calibration.collect import Sample, collect_splits
from tide_export.calibration.distributed import Processes
from tide_export.calibration.evaluate import count_costs, evaluate, read_examples, report_checkpoints
from tide_export.calibration.fit_checkpoints import fit_checkpoints
from tide_export.calibration.placement import measure_layers, place_checkpoints
from tide_export.calibration.split import split_sequences
from tide_export.config import TideConfig
from tide_export.data.documents import Documents
from tide_export.data.sequences import TokenSequence, read_sequences
from tide_export.model.source import SourceModel
from tide_export.progress import stage
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.pareto import constant_routers
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.version import __version__

logger = logging.getLogger("tide_export")


@dataclass(frozen=True)
class Calibration:
    """The fitted routers, and what was measured of them on held-out documents."""

    routers: RouterSet
    assessment: Assessment


def calibrate(
    source: SourceModel, tokenizer: PreTrainedTokenizerBase, config: TideConfig, cache: Path | None = None
) -> Calibration | None:
    """Fits the routers and lenses of `source` on `config.calibration_dataset`; None in all but the main process.

    The routers' provenance holds `model`, `weights_sha256`, `num_layers`, `hidden_size` (of normalized states);
    `dataset`, `dataset_sha256` (of the text read), `document_hashes`, `documents`, `sequences`, `tokens`; `split` and
    `label`, `exit_strategy`; `config`, `versions`; `remote_code` (only where code of the model's own was run); and
    `report`: per checkpoint (a string) the result of `fit_router.assess` on the test split, and `lens` where there is
    one.

    Args:
        cache: a folder for the hidden states, instead of memory; a run that was killed resumes from it.

    Raises:
        ConfigError: no such checkpoints in this model.
        DatasetError: the dataset cannot be read or holds no text.
        CalibrationError: too little text, a tokenizer of another model, NaN in a hidden state, no checkpoint left.
    """
    if config.checkpoints != "auto":
        config.resolve_checkpoints(source.num_layers)  # raises before the text is read
    documents = Documents(config.calibration_dataset)
    sequences = _read(source, tokenizer, config, documents)
    split = split_sequences(sequences, config.validation_fraction, config.test_fraction, config.seed)
    if split.unit == "sequences":
        logger.warning(
            "dataset %r has too few documents to validate on separate ones: its last sequences are used instead, and "
            "the report will look better than new text would",
            documents.spec,
        )
    checkpoints = place_checkpoints(source, split.train, config)
    samples = collect_splits(source, split, checkpoints, config, cache)
    statistics = measure_layers(source, split.test, config)  # before the other processes end: they share this work
    if not Processes.current().main:
        return None

    routers, reports = fit_checkpoints(source, config, checkpoints, samples["train"], samples["validation"])
    with stage("measuring the exits on held-out text", total=1.0) as advance:
        evaluation = evaluate(source, routers, samples["test"], config, advance)
    for sentence in constant_routers(evaluation.scores, routers.checkpoints):
        logger.warning("%s", sentence)
    provenance = _provenance(source, config, documents, sequences, samples) | {
        "split": split.unit,
        "report": report_checkpoints(source, routers, samples["test"], evaluation, config, reports),
    }
    routers = replace(routers, provenance=provenance)
    thresholds = tuple(config.exit_threshold if c >= config.min_layers else MAX_THRESHOLD for c in routers.checkpoints)
    folder = Path(source.name)
    assessment = Assessment(
        model=folder.resolve().name if folder.is_dir() else source.name,
        thresholds=thresholds,
        evaluation=evaluation,
        convergence=statistics.convergence(),
        examples=read_examples(source, tokenizer, routers, split.test, thresholds),
        costs=count_costs(source, config),
        provenance=provenance,
    )
    return Calibration(routers, assessment)


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


def _provenance(
    source: SourceModel,
    config: TideConfig,
    documents: Documents,
    sequences: list[TokenSequence],
    samples: dict[str, Sample],
) -> dict[str, Any]:
    """Records model, text and settings; `calibrate` adds the split and the report."""
    quantization = {} if source.quantized is None else {"quantization": asdict(source.quantized.settings)}
    packages = {package: version(package) for package in ("torch", "transformers", "datasets")}
    return {
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
        "label": config.label,
        "exit_strategy": config.exit_strategy,
        "config": config.model_dump(mode="json"),
        "versions": {"tide_export": __version__} | packages,
        **quantization,
        **({"remote_code": True} if source.remote_code else {}),
    }
