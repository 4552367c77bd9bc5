"""Tokenizes documents into sequences, for `calibrate`, `validate` and `tune`.

Each sequence records its document: training, validation and test text are split between documents, because tokens of
one document resemble each other.
"""

import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tide_export.bundle.tokenizer_check import check_tokenizer, tokenizer_errors
from tide_export.common.progress import quiet_transformers
from tide_export.data.documents import Documents
from tide_export.errors import ConfigError, DatasetError, ModelError, one_line
from tide_export.model.pretrained import code_error, opened

MIN_DOCUMENTS = 32  # minimum number of documents to sample sequences from, if the dataset has as many
BLOCK_CHARS = 1 << 18  # text tokenized at a time


@dataclass(frozen=True, eq=False)  # compared by identity: equal texts are two sequences
class TokenSequence:
    """A part of a document.

    Attributes:
        document: number of the document in the dataset, from 0.
        ids: token ids, int32 [n], starting with the tokenizer's prefix (the BOS token, if it has one). A list would
            need nine times the memory.
        first: first position whose state calibration uses; earlier positions belong to a prompt.
    """

    document: int
    ids: np.ndarray
    first: int = 0


def load_tokenizer(name: str | os.PathLike, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of model `name`, a folder, a hub id or a GGUF file.

    Args:
        trust_remote_code: run Python code from the model's folder (`auto_map` in its tokenizer_config.json).

    Raises:
        ModelError: there is no tokenizer, it cannot be read, needs code that is not trusted, cannot encode every text,
            or lets text grow without bound.
    """
    name = os.fspath(name)
    with tokenizer_errors(f"cannot load the tokenizer of model {name!r}", ModelError):
        try:
            with quiet_transformers(), opened(name, trust_remote_code) as (path, options):
                tokenizer = AutoTokenizer.from_pretrained(path, **options)
        except ModelError:
            raise
        except Exception as error:  # transformers, tokenizers and the hub raise many types
            failed = ModelError(f"cannot load the tokenizer of model {name!r}: {one_line(error)}")
            raise code_error(name, error) or failed from error
    if not len(tokenizer):
        raise ModelError(f"model {name!r} has no tokenizer: its vocabulary is empty")
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        check_tokenizer(tokenizer.backend_tokenizer, f"the tokenizer of model {name!r}", ModelError)
    return tokenizer


def read_sequences(
    dataset: str | Documents, tokenizer: PreTrainedTokenizerBase, length: int, limit: int
) -> Iterator[TokenSequence]:
    """Yields at most `limit` sequences of at most `length` tokens from a dataset.

    Long documents are cut into consecutive sequences without overlap. Each document first contributes at most
    `limit / MIN_DOCUMENTS` sequences (at least one), so that no long document fills the sample. If the dataset ends
    before the limit, the remaining sequences follow, those nearest to the start of their document first. Reading stops
    at the limit.

    Args:
        dataset: a SPEC, or `Documents` that were not iterated yet.

    Raises:
        DatasetError: see `Documents`.
        ConfigError: `length` leaves no room after the tokenizer's prefix.
    """
    documents = Documents(dataset) if isinstance(dataset, str) else dataset
    prefix = _prefix(tokenizer)
    if length <= len(prefix):
        raise ConfigError(f"sequences of {length} tokens hold nothing but the {len(prefix)} the tokenizer puts first")
    share = max(1, limit // MIN_DOCUMENTS)
    yielded = 0
    # A heap of the remaining sequences; its top, dropped first at the limit, is furthest into its document.
    rest: list[tuple[int, int, TokenSequence]] = []
    order = count()
    for number, text in enumerate(documents):
        for index, ids in enumerate(_chunks(text, tokenizer, length - len(prefix))):
            sequence = TokenSequence(number, np.array(prefix + ids, np.int32))
            if index < share:
                yield sequence
                yielded += 1
                if yielded == limit:
                    return
                continue
            heapq.heappush(rest, (-index, -next(order), sequence))
            if len(rest) > limit:
                dropped = heapq.heappop(rest)
                if dropped[2] is sequence:
                    break  # later sequences of this document are further still
    rest.sort(reverse=True)
    for _, _, sequence in rest[: limit - yielded]:
        yield sequence
    if not yielded:
        raise DatasetError(f"dataset {documents.spec!r} holds no text that the tokenizer knows")


def _chunks(text: str, tokenizer: PreTrainedTokenizerBase, size: int) -> Iterator[list[int]]:
    """Yields the tokens of a text in chunks of `size`; the last one may be shorter."""
    rest: list[int] = []
    start = 0
    while start < len(text):
        end = start + BLOCK_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end  # a cut at a line end rarely splits a token
        rest += tokenizer(text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
        start = end
        complete = len(rest) - len(rest) % size
        for first in range(0, complete, size):
            yield rest[first : first + size]
        rest = rest[complete:]
    if rest:
        yield rest


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens that the tokenizer adds before a text (BOS), with which sequences start."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    starts = (n for n in range(len(full) - len(plain) + 1) if full[n : n + len(plain)] == plain)
    return full[: next(starts, 0)] if plain else []
