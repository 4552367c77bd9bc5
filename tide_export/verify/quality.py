"""Measures changed tokens and perplexity of exits against full depth (`validate --quality`).

The deployed engine reads text that its routers have not seen, one token at a time, so that tokens exit, stay pending
and catch up as in decoding. The next input is always the text's token, whatever the engine predicts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from tide_export.bundle.manifest import Manifest
from tide_export.common.changed_tokens import TEMPERATURE, Change, added_loss, change, changed_tokens
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
        perplexity: of the text's tokens: the exponential of their mean negative log-likelihood.
        change: changed tokens, and the change of perplexity of full depth's own tokens.
        layers: mean layers before the exits.
    """

    name: str
    tokens: int
    perplexity: float
    change: Change
    layers: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, those of `change` among them, as JSON types."""
        return attributes(self, "name", "perplexity", "layers") | asdict(self.change)


class _Read(NamedTuple):
    """The predictions of n tokens of a text by a setting, all [n]."""

    nll: np.ndarray  # of the text's tokens, nats
    changed: np.ndarray  # `changed_tokens`
    added: np.ndarray  # `added_loss`, nats
    layers: np.ndarray  # before the exits


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
    temperature: float = TEMPERATURE,
    advance: Callable[[float], object] = lambda amount: None,
) -> list[Quality]:
    """Reads `texts` at full depth and in each of `settings`; returns the results, full depth first.

    Args:
        settings: (name, one threshold per checkpoint).
        texts: token ids, two or more each.
        temperature: at which changed tokens are counted; 0: greedy.
        advance: called with 1 after each text of each setting.

    Raises:
        GenerationError: a step failed.
    """
    every = [("full", [NEVER_EXIT] * len(engine.manifest.checkpoints)), *settings]
    read: list[list[_Read]] = [[] for _ in every]
    for ids in texts:
        full = None
        for (_, thresholds), of_texts in zip(every, read, strict=True):
            logits, layers = _predict(engine, thresholds, ids, max_pending)
            full = logits if full is None else full
            changed, added = changed_tokens(full, logits, temperature), added_loss(full, logits, temperature)
            of_texts.append(_Read(_nll(logits, ids[1:]), changed, added, layers))
            advance(1)
    return [_quality(name, of_texts, temperature) for (name, _), of_texts in zip(every, read, strict=True)]


def render(qualities: Sequence[Quality]) -> str:
    """Returns the table that `validate` prints."""
    rows = [
        [
            one.name,
            one.tokens,
            f"{one.perplexity:.3f}",
            f"{100 * one.change.changed:.2f} ± {100 * one.change.changed_error:.2f} %",
            f"{100 * one.change.perplexity:+.2f} ± {100 * one.change.perplexity_error:.2f} %",
            f"{one.layers:.2f}",
        ]
        for one in qualities
    ]
    return table(
        ["quality", "tokens", "perplexity of the text", "changed tokens", "change of perplexity", "mean exit layer"],
        rows,
    )


def _predict(
    engine: Engine, thresholds: Sequence[float], ids: Sequence[int], max_pending: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reads a text of n + 1 tokens; returns logits float32 [n, V] after each but the last, and layers."""
    sequence = engine.start(thresholds, max_pending)
    results = [sequence.step([token]) for token in ids[:-1]]
    return np.stack([result.logits for result in results]), np.array([result.exit_layer for result in results])


def _nll(logits: np.ndarray, following: Sequence[int]) -> np.ndarray:
    """Returns -log P of each of the tokens `following`, float64 [n], in nats, under logits [n, V]."""
    precise = logits.astype(np.float64)
    highest = precise.max(axis=-1)
    return highest + np.log(np.exp(precise - highest[:, None]).sum(axis=-1)) - precise[range(len(precise)), following]


def _quality(name: str, read: Sequence[_Read], temperature: float) -> Quality:
    nll, changed, added, layers = (np.concatenate(values) for values in zip(*read, strict=True))
    texts = np.arange(len(read)).repeat([len(one.nll) for one in read])
    return Quality(
        name=name,
        tokens=len(nll),
        perplexity=float(np.exp(nll.mean())),
        change=change(changed, added, texts, temperature),
        layers=float(layers.mean()),
    )
