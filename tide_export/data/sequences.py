"""Turns documents into token sequences for the model: second step of `calibrate`, shared with `validate` and `tune`.

Each sequence knows the document it comes from, because tokens of one document resemble each other: training, validation
and test are split between documents, and a guarantee counts prompts.
"""

import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tide_export.data.documents import Documents
from tide_export.errors import ConfigError, DatasetError, ModelError, one_line

COVERED_DOCUMENTS = 32  # no document gives more than one in this many sequences while there are others
BLOCK_CHARS = 1 << 18  # text tokenized at a time


@dataclass(frozen=True, eq=False)  # by identity: arrays have no truth of their own, and equal texts are two sequences
class TokenSequence:
    """A piece of a document.

    Attributes:
        document: number of the document in the dataset, from 0.
        ids: token ids, int32 [n] (a list of Python's takes nine times the memory); begins with what the tokenizer puts
            before every text (the BOS token, where it has one).
    """

    document: int
    ids: np.ndarray


def load_tokenizer(name: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer of model `name`, a folder or a hub id.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    name = os.fspath(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers, tokenizers and the hub raise many kinds; all mean: not loadable
        raise ModelError(f"cannot load the tokenizer of model {name!r}: {one_line(error)}") from error
    if not len(tokenizer):
        raise ModelError(f"model {name!r} has no tokenizer: its vocabulary is empty")
    return tokenizer


def read_sequences(
    dataset: str | Documents, tokenizer: PreTrainedTokenizerBase, length: int, limit: int
) -> Iterator[TokenSequence]:
    """At most `limit` sequences of at most `length` tokens from a dataset SPEC (or `Documents` not yet read).

    Long documents are cut into consecutive sequences without overlap. So that one long document cannot fill the whole
    sample, each first gives `limit / COVERED_DOCUMENTS` sequences at most (at least one); only when the dataset ends
    before the limit do the rests of the documents follow, beginnings before ends. Reading stops at the limit.

    Raises:
        DatasetError: see `Documents`.
        ConfigError: `length` leaves no room beside the tokenizer's own tokens.
    """
    documents = Documents(dataset) if isinstance(dataset, str) else dataset
    prefix = _prefix(tokenizer)
    if length <= len(prefix):
        raise ConfigError(f"sequences of {length} tokens hold nothing but the {len(prefix)} the tokenizer puts first")
    share = max(1, limit // COVERED_DOCUMENTS)
    given = 0
    # The rests, in a heap whose top is the furthest into its document: the first to go when there are more than
    # `limit`.
    rests: list[tuple[int, int, TokenSequence]] = []
    order = count()
    for number, text in enumerate(documents):
        for index, ids in enumerate(_chunks(text, tokenizer, length - len(prefix))):
            sequence = TokenSequence(number, np.array(prefix + ids, np.int32))
            if index < share:
                yield sequence
                given += 1
                if given == limit:
                    return
                continue
            heapq.heappush(rests, (-index, -next(order), sequence))
            if len(rests) > limit:
                dropped = heapq.heappop(rests)
                if dropped[2] is sequence:
                    break  # what follows in this document is further still
    rests.sort(reverse=True)
    for _, _, sequence in rests[: limit - given]:
        yield sequence
    if not given:
        raise DatasetError(f"dataset {documents.spec!r} holds no text that the tokenizer knows")


def _chunks(text: str, tokenizer: PreTrainedTokenizerBase, size: int) -> Iterator[list[int]]:
    """The tokens of a text, `size` at a time; the last chunk may be shorter."""
    rest: list[int] = []
    start = 0
    while start < len(text):
        end = start + BLOCK_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end  # a cut at a line end hardly ever parts a token
        rest += tokenizer(text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
        start = end
        whole = len(rest) - len(rest) % size
        for first in range(0, whole, size):
            yield rest[first : first + size]
        rest = rest[whole:]
    if rest:
        yield rest


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text (BOS): every sequence starts with it, as every prompt does at run time."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    starts = (n for n in range(len(dressed) - len(plain) + 1) if dressed[n : n + len(plain)] == plain)
    return dressed[: next(starts, 0)] if plain else []
