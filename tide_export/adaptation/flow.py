"""`tide-export adapt`: trains a model to exit early and writes it with its quality before and after."""

import logging
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tide_export.adaptation.config import AdaptConfig
from tide_export.adaptation.lora import Lora
from tide_export.adaptation.losses import Batch
from tide_export.adaptation.output import check_output, check_space, round_weights, write_model
from tide_export.adaptation.quality import Quality, measure, measure_change
from tide_export.adaptation.report import AdaptReport
from tide_export.adaptation.snapshot import Snapshot
from tide_export.adaptation.training import Trainer, padded
from tide_export.calibration.distributed import Processes
from tide_export.calibration.fast_attention import fast_attention
from tide_export.common.progress import stage
from tide_export.data.documents import Documents
from tide_export.data.sequences import TokenSequence, load_tokenizer, read_sequences
from tide_export.errors import AdaptError, ModelError
from tide_export.model.paths import is_gguf
from tide_export.model.pretrained import read_config
from tide_export.model.quantized_files import prepare_quantized
from tide_export.model.source import SourceModel, load_model

logger = logging.getLogger("tide_export")

SAMPLED = 256  # sequences that show how long they are

# Settings that may change when a run resumes: none affects the number of steps or the text of a step.
CHANGEABLE = {
    "learning_rate",
    "original_weight",
    "early_weight",
    "label_weight",
    "precision",
    "micro_batch",
    "save_minutes",
    "clip",
}


def adapt(
    model: str,
    output: str | os.PathLike[str],
    config: AdaptConfig | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> AdaptReport | None:
    """Trains `model` for early exit and writes it to the folder `output` in Hugging Face format.

    A run that was interrupted resumes from the snapshot in `cache` when it is started again.

    Args:
        model: folder or hub id.
        cache: folder of the snapshot; None: a hidden folder beside the output.
        trust_remote_code: run Python code from the model's folder (see `model.source.load_model`).

    Returns:
        The report; None in every process but the main one.

    Raises:
        AdaptError: the model is quantized, the text is too short, the output exists or cannot be written, a loss is
            not finite, or peft is missing.
        TideError: the model or the text cannot be read.
    """
    config, target = config or AdaptConfig(), Path(output).absolute()
    folder = target.parent / f".{target.name}.adapt" if cache is None else Path(cache)
    processes = Processes.current()
    if processes.main:
        check_output(target, Snapshot(folder, {}))
    documents = Documents(config.dataset)
    others = None if config.held_out is None else Documents(config.held_out)
    dtype = _stored_dtype(model, trust_remote_code)
    device = f"cuda:{processes.rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    with stage("loading the model"):
        source = load_model(model, device=device, trust_remote_code=trust_remote_code)
    exits = config.exits(source.num_layers)
    tokenizer = load_tokenizer(model, trust_remote_code)
    with stage("reading text"):
        texts, held_out = _read(documents, others, source, tokenizer, config)
    steps = -(-config.tokens // max(1, round(config.batch * float(np.mean([len(text.ids) for text in texts])))))
    settings = config.model_dump(mode="json", exclude=CHANGEABLE) | {"exits": list(exits), "steps": steps}
    settings |= {"model": source.weights_sha256, "text": documents.sha256}
    settings |= {} if others is None else {"held_out_text": others.sha256}
    snapshot = Snapshot(folder, settings)
    measured = [
        padded(held_out[i : i + config.micro_batch], source.device) for i in range(0, len(held_out), config.micro_batch)
    ]

    held = snapshot.locked() if processes.main else nullcontext()
    with held, fast_attention(source, texts[0].ids.tolist(), [source.num_layers]):
        saved = snapshot.load()
        lora = Lora(source, config.lora_rank, config.seed) if config.lora_rank else None
        trainer = Trainer(source, texts, config, exits, steps, snapshot, lora)
        check_space(source, target, snapshot, dtype, sum(weight.numel() for weight in trainer.parameters))
        before = _measure_before(source, measured, saved) if processes.main else None
        if saved is not None:
            trainer.resume(saved)
            logger.info("resuming after step %d of %d, saved in %s", trainer.step, steps, snapshot.file)
        with processes.stage("training", float(steps)) as advance:
            advance(trainer.step)
            trainer.train({} if before is None else {"before": asdict(before)}, advance)
        if before is None:  # another process than the main one
            return None
        if lora is not None:
            lora.merge()
        round_weights(source, dtype)
        with stage("measuring the result"):
            after = measure(source, measured)
            original = (
                trainer.teacher
                if lora is None
                else load_model(model, device=device, trust_remote_code=trust_remote_code)
            )
            changes = measure_change(original, source, measured)
        tokens = round(steps * config.batch * float(np.mean([len(text.ids) for text in texts])))
        recorded = settings | config.model_dump(mode="json", include=CHANGEABLE) | {"source": model}
        report = AdaptReport(str(output), recorded, exits, tokens, before, after, *changes)
        with stage("writing the model"):
            write_model(source, tokenizer, target, dtype, report.write)
        snapshot.remove()
    return report


def _stored_dtype(model: str, trust_remote_code: bool) -> torch.dtype:
    """Returns the dtype in which the model's weights are stored.

    Raises:
        AdaptError: they are quantized.
    """
    config = None if is_gguf(model) else read_config(model, trust_remote_code)
    quantized = "GGUF" if config is None else prepare_quantized(config, model)
    if config is None or quantized is not None:
        raise AdaptError(
            f"{model} is quantized ({quantized}): train the model it was made from, and quantize the result again"
        )
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))


def _read(
    documents: Documents,
    others: Documents | None,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    config: AdaptConfig,
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Reads the sequences to train on and to measure on.

    The latter come from `others`, or are held out of `documents`.

    Raises:
        AdaptError: there is too little text.
        ModelError: a token is outside the model's vocabulary.
    """
    length = min(config.length, source.context_length or config.length)

    def read(text: Documents, tokens: int) -> list[TokenSequence]:
        first = read_sequences(Documents(text.spec), tokenizer, length, SAMPLED)
        mean = float(np.mean([len(sequence.ids) for sequence in first]))
        sequences = read_sequences(text, tokenizer, length, math.ceil(1.25 * tokens / mean) + 2)
        return [sequence for sequence in sequences if len(sequence.ids) > 1]

    if others is None:
        texts, held_out = _split(read(documents, config.tokens + config.held_out_tokens), config)
    else:
        texts, held_out = read(documents, config.tokens), read(others, config.held_out_tokens)
    if not held_out or len(texts) < config.batch:
        dataset = config.dataset if held_out or others is None else others.spec
        raise AdaptError(
            f"dataset {dataset!r} is too short: it gives {len(texts)} sequences to train on (--batch: {config.batch}) "
            f"and {len(held_out)} of other documents to measure on (1 or more)"
        )
    ends = np.cumsum([len(sequence.ids) for sequence in held_out])
    held_out = held_out[: int(np.searchsorted(ends, config.held_out_tokens)) + 1]
    largest = max(int(sequence.ids.max()) for sequence in texts + held_out)
    if largest >= source.vocab_size:
        raise ModelError(
            f"the tokenizer gives token {largest}, and the model knows {source.vocab_size}: it is another model's"
        )
    return texts, held_out


def _split(sequences: list[TokenSequence], config: AdaptConfig) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Holds out about `held_out_tokens`, at most a fifth of the tokens and half of the documents."""
    total, order = sum(len(one.ids) for one in sequences), np.random.default_rng(config.seed)
    held_out, wanted = set[int](), min(config.held_out_tokens, total // 5)
    tokens = 0
    numbers = order.permutation(sorted({sequence.document for sequence in sequences})).tolist()
    for number in numbers[: len(numbers) // 2]:
        if tokens < wanted:
            held_out.add(number)
            tokens += sum(len(one.ids) for one in sequences if one.document == number)
    texts = [sequence for sequence in sequences if sequence.document not in held_out]
    return texts, [sequence for sequence in sequences if sequence.document in held_out]


def _measure_before(source: SourceModel, batches: Sequence[Batch], saved: dict[str, Any] | None) -> Quality:
    if saved is not None:
        return Quality(**saved["before"])
    with stage("measuring the model"):
        quality = measure(source, batches)
    if not np.isfinite(quality.perplexity):
        raise AdaptError("the model's perplexity on the held-out text is not finite: it cannot be trained on this text")
    return quality
