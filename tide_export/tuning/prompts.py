"""Draws the prompts of `tune` from documents.

A prompt is a part of a document, tokenized as by `generate`; it is the unit that the guarantee counts. Documents that
the routers were fitted on are omitted, and no document gives prompts both to the choice of candidates and to the test.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide_export.data.documents import Documents, document_hash
from tide_export.errors import BundleError, TuneError
from tide_export.runtime.tokenizer import BundleTokenizer

logger = logging.getLogger("tide_export")
PATH_SHARE = 1 / 3  # of the documents: candidates are chosen on these and tested on the others
STRETCH_CHARS = 1 << 18  # a random part of this size is tokenized of a longer document


@dataclass(frozen=True)
class Prompts:
    """Holds the prompts drawn from a dataset.

    Attributes:
        path: token ids [L] of each prompt that candidates are chosen on.
        calibration: token ids [L] of each prompt that they are tested on; from other documents.
        path_documents, calibration_documents: number of documents of each.
        document_hashes: `document_hash` of each document, the path's first.
        document_prompts: number of prompts of each document, in the order of the prompts.
        seen, duplicates, short: documents omitted because the routers saw them, they were repeated, or they have fewer
            than L tokens.
        dataset_sha256: checksum over the documents read (`Documents.sha256`).
        overlap: how documents that the routers saw were recognised: "per document" or "no".
    """

    path: list[list[int]]
    calibration: list[list[int]]
    path_documents: int
    calibration_documents: int
    document_hashes: list[str]
    document_prompts: list[int]
    seen: int
    duplicates: int
    short: int
    dataset_sha256: str
    overlap: str


def seen_documents(calibration: Mapping[str, Any] | None) -> frozenset[str] | None:
    """Returns the hashes of the documents that the routers were fitted on; None: their record has none.

    Raises:
        BundleError: the record is damaged.
    """
    hashes = (calibration or {}).get("document_hashes")
    if hashes is None:
        logger.warning(
            "the routers have no calibration record of their documents, so make sure yourself that they were not "
            "fitted on this text"
        )
        return None
    if not (isinstance(hashes, list) and all(isinstance(entry, str) for entry in hashes)):
        raise BundleError("field 'calibration.document_hashes' of the bundle must be a list of strings")
    return frozenset(hashes)


def draw_prompts(
    dataset: str,
    tokenizer: BundleTokenizer,
    calibration: Mapping[str, Any] | None,
    *,
    length: int,
    count: int,
    per_document: int,
    seed: int,
) -> Prompts:
    """Draws up to `count` prompts of exactly `length` tokens, up to `per_document` from one document.

    The first `count` usable documents of the dataset are read. Each gives one prompt, then (until there are enough) a
    second, and so on, from random positions that do not overlap. A third of the documents is for the path.

    Args:
        calibration: the bundle's calibration record; documents that the routers saw are omitted.
        length: tokens of a prompt, the tokenizer's prefix included.

    Raises:
        DatasetError: the dataset cannot be read or holds no text.
        TuneError: fewer than two documents are usable; says why.
    """
    random = np.random.default_rng(seed)
    seen = seen_documents(calibration)
    documents = Documents(dataset)
    previous: set[str] = set()
    names: list[str] = []  # hashes of the usable documents
    usable: list[list[list[int]]] = []
    omitted = {"seen": 0, "duplicates": 0, "short": 0}
    for text in documents:
        name = document_hash(text)
        if seen is not None and name in seen:
            omitted["seen"] += 1
        elif name in previous:
            omitted["duplicates"] += 1
        elif stretches := _stretches(text, tokenizer, length, per_document, random):
            names.append(name)
            usable.append(stretches)
        else:
            omitted["short"] += 1
        previous.add(name)
        if len(usable) >= count:
            break
    _require_two(dataset, documents.count, len(usable), omitted, length)

    taken = _round_robin(usable[:count], count)
    order = random.permutation(len(taken))
    first = max(1, round(len(taken) * PATH_SHARE))
    return Prompts(
        path=[prompt for number in order[:first] for prompt in taken[number]],
        calibration=[prompt for number in order[first:] for prompt in taken[number]],
        path_documents=first,
        calibration_documents=len(taken) - first,
        document_hashes=[names[number] for number in order],
        document_prompts=[len(taken[number]) for number in order],
        dataset_sha256=documents.sha256,
        overlap="no" if seen is None else "per document",
        **omitted,
    )


def _stretches(
    text: str, tokenizer: BundleTokenizer, length: int, max_prompts: int, random: np.random.Generator
) -> list[list[int]]:
    """Draws up to `max_prompts` prompts from random positions of a document; none if it is too short."""
    if len(text) > STRETCH_CHARS:
        start = int(random.integers(len(text) - STRETCH_CHARS + 1))
        text = text[start : start + STRETCH_CHARS]
    prefix = tokenizer.prefix()
    ids, size = tokenizer.encode_plain(text), length - len(prefix)
    if size < 1:
        raise TuneError(f"prompts of {length} tokens hold nothing but the {len(prefix)} the tokenizer puts first")
    whole = len(ids) // size
    if whole == 0:
        return []
    offset = int(random.integers(len(ids) - whole * size + 1))  # the remainder lies before and after the prompts
    places = random.permutation(whole)[:max_prompts]
    return [prefix + ids[offset + place * size : offset + (place + 1) * size] for place in places]


def _round_robin(usable: Sequence[Sequence[list[int]]], count: int) -> list[list[list[int]]]:
    """Takes up to `count` prompts, one of each document in each round."""
    taken: list[list[list[int]]] = [[] for _ in usable]
    remaining = count
    for turn in range(max(map(len, usable))):
        for chosen, prompts in zip(taken, usable, strict=True):
            if remaining and turn < len(prompts):
                chosen.append(prompts[turn])
                remaining -= 1
    return taken


def _require_two(dataset: str, read: int, usable: int, omitted: Mapping[str, int], length: int) -> None:
    if usable >= 2:
        return
    why = ", ".join(
        f"{number} {reason}"
        for number, reason in (
            (omitted["seen"], "seen by the routers"),
            (omitted["duplicates"], "repeated"),
            (omitted["short"], f"shorter than {length} tokens"),
        )
        if number
    )
    raise TuneError(
        f"dataset {dataset!r} has {read} documents of which {usable} can be used"
        + (f" ({why})" if why else "")
        + ": candidates are chosen on some documents and tested on others, so at least 2 that the routers have not "
        "seen are needed"
    )
