"""Measures perplexity and top-1 agreement of exits against full depth (`validate --quality`).

The deployed engine reads text that its routers have not seen, one token at a time, so that tokens exit, stay pending
and catch up as in decoding. The next input is always the text's token, whatever the engine predicts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from tide_export.bundle.manifest import Manifest
from tide_export.common.formatting import attributes, table
from tide_export.data.documents import Documents
from tide_export.data.sequences import read_sequences
from tide_export.errors import DatasetError
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import NEVER_EXIT

LENGTH = 256  # tokens of a text


@dataclass(frozen=True)
class Quality:
    """The predictions of one setting for n tokens of text.

    Attributes:
        name: the setting's name.
        tokens: n.
        perplexity: exponential of the mean negative log-likelihood of the text's tokens.
        change: perplexity relative to that of full depth, minus 1.
        change_error: standard error of `change` over texts; None for a single text.
        agreement: share of positions with the most likely token of full depth.
        layers: mean layers before the exits.
    """

    name: str
    tokens: int
    perplexity: float
    change: float
    change_error: float | None
    agreement: float
    layers: float

    def as_dict(self) -> dict[str, Any]:
        return attributes(self, "name", "tokens", "perplexity", "change", "change_error", "agreement", "layers")


class _Predictions(NamedTuple):
    """Predictions per text, for the n tokens after its first."""

    nll: list[np.ndarray]  # float64 [n], nats
    top1: list[np.ndarray]  # int64 [n], most likely tokens
    layers: list[np.ndarray]  # int64 [n], layers before the exits


def quality_texts(manifest: Manifest, tokenizer: PreTrainedTokenizerBase, dataset: str, tokens: int) -> list[list[int]]:
    """Reads texts of up to `LENGTH` tokens, `tokens` in all or fewer, of different documents if possible.

    Documents that the bundle's routers were fitted on, by its calibration record, are omitted.

    Raises:
        DatasetError: the dataset cannot be read, or holds no other text.
    """
    hashes = (manifest.calibration or {}).get("document_hashes")
    seen = frozenset(filter(lambda one: isinstance(one, str), hashes)) if isinstance(hashes, list) else frozenset()
    documents = Documents(dataset, omit=seen)
    length = min(LENGTH, manifest.model.context_length or LENGTH)
    texts, total = list[list[int]](), 0
    try:
        for sequence in read_sequences(documents, tokenizer, length, limit=4 * -(-tokens // length)):
            ids = sequence.ids[: max(2, tokens - total)].tolist()
            if len(ids) > 1:  # the first token is not predicted
                texts.append(ids)
                total += len(ids)
            if total + 1 >= tokens:
                break
    except DatasetError:
        if documents.omitted and not documents.count:
            raise DatasetError(
                f"dataset {dataset!r} holds only documents that the routers were fitted on: give other text for "
                "--quality with --dataset"
            ) from None
        raise
    if not texts:
        raise DatasetError(f"dataset {dataset!r} holds no text of two tokens or more")
    return texts


def measure_quality(
    engine: Engine,
    settings: Sequence[tuple[str, Sequence[float]]],
    texts: Sequence[Sequence[int]],
    max_pending: int,
    advance: Callable[[float], object] = lambda amount: None,
) -> list[Quality]:
    """Reads `texts` at full depth and in each of `settings`; returns the results, full depth first.

    Args:
        settings: (name, one threshold per checkpoint).
        texts: token ids, two or more each.
        advance: called with 1 after each text of each setting.

    Raises:
        GenerationError: a step failed.
    """
    never = [NEVER_EXIT] * len(engine.manifest.checkpoints)
    full = _predict(engine, never, texts, max_pending, advance)
    qualities = [_quality("full", full, full)]
    for name, thresholds in settings:
        qualities.append(_quality(name, _predict(engine, thresholds, texts, max_pending, advance), full))
    return qualities


def render(qualities: Sequence[Quality]) -> str:
    """Returns the table that `validate` prints."""
    rows = [
        [
            one.name,
            one.tokens,
            f"{one.perplexity:.3f}",
            f"{100 * one.change:+.2f} %" + ("" if one.change_error is None else f" ± {100 * one.change_error:.2f}"),
            f"{100 * one.agreement:.2f} %",
            f"{one.layers:.2f}",
        ]
        for one in qualities
    ]
    return table(["quality", "tokens", "perplexity", "to full", "same top-1", "mean exit layer"], rows)


def _predict(
    engine: Engine,
    thresholds: Sequence[float],
    texts: Sequence[Sequence[int]],
    max_pending: int,
    advance: Callable[[float], object],
) -> _Predictions:
    read = _Predictions([], [], [])
    for ids in texts:
        sequence = engine.start(thresholds, max_pending)
        nll, top1, layers = [], [], []
        for token, following in pairwise(ids):
            result = sequence.step([token])
            logits = result.logits.astype(np.float64)
            highest = logits.max()
            nll.append(highest + np.log(np.exp(logits - highest).sum()) - logits[following])
            top1.append(int(logits.argmax()))
            layers.append(result.exit_layer)
        for values, of_text in zip(read, (nll, top1, layers), strict=True):
            values.append(np.array(of_text))
        advance(1)
    return read


def _quality(name: str, read: _Predictions, full: _Predictions) -> Quality:
    nll, top1, layers = (np.concatenate(values) for values in read)
    sizes = np.array([len(values) for values in read.nll])
    more = np.array([(nll - at_full).sum() for nll, at_full in zip(read.nll, full.nll, strict=True)])  # nats, per text
    mean = more.sum() / sizes.sum()
    error = None
    if len(more) > 1:  # the error of a ratio of sums over texts, by the delta method
        error = float(
            np.exp(mean) * np.sqrt(((more - mean * sizes) ** 2).sum() * len(more) / (len(more) - 1)) / sizes.sum()
        )
    return Quality(
        name=name,
        tokens=len(nll),
        perplexity=float(np.exp(nll.mean())),
        change=float(np.expm1(mean)),
        change_error=error,
        agreement=float((top1 == np.concatenate(full.top1)).mean()),
        layers=float(layers.mean()),
    )
