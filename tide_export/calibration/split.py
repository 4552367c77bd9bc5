"""Splits sequences into training, validation and test, between documents if there are enough.

Tokens of one document resemble each other, so a router measured on a document that it was fitted to is overestimated.
Training fits, validation stops and scales, test only measures.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError


@dataclass(frozen=True)
class Split:
    """Three disjoint, non-empty parts, training the largest.

    `unit` is "documents" if no document is in two parts, "sequences" if there were too few documents for that.
    """

    train: list[TokenSequence]
    validation: list[TokenSequence]
    test: list[TokenSequence]
    unit: str


def split_sequences(
    sequences: Sequence[TokenSequence], validation_fraction: float, test_fraction: float, seed: int
) -> Split:
    """Assigns whole documents to test and then to validation, in random order, while they fit.

    If that gives less than half of a fraction (few or long documents), the one document nearest in size is used, if it
    has at most a third of all tokens. If there is none, or training would not be the largest part, the last sequences
    are used instead, whatever their documents.

    Raises:
        CalibrationError: there are fewer than three sequences.
    """
    if len(sequences) < 3:
        raise CalibrationError(
            f"the dataset gives {len(sequences)} sequence(s): routers need at least 3, to fit, to "
            "validate and to test: give more text"
        )
    tokens: Counter[int] = Counter()
    for sequence in sequences:
        tokens[sequence.document] += len(sequence.ids)
    order = np.random.default_rng(seed).permutation(sorted(tokens)).tolist()
    test = _whole_documents(tokens, order, test_fraction * tokens.total(), tokens.total() / 3)
    rest = [document for document in order if document not in test]
    validation = _whole_documents(tokens, rest, validation_fraction * tokens.total(), tokens.total() / 3)
    sizes = [sum(tokens[document] for document in part) for part in (validation, test)]
    if validation and test and tokens.total() - sum(sizes) >= max(sizes):
        return Split(
            [sequence for sequence in sequences if sequence.document not in validation | test],
            [sequence for sequence in sequences if sequence.document in validation],
            [sequence for sequence in sequences if sequence.document in test],
            "documents",
        )
    tested = max(1, int(test_fraction * len(sequences)))
    validated = max(1, int(validation_fraction * len(sequences)))
    trained = len(sequences) - validated - tested
    return Split(
        list(sequences[:trained]),
        list(sequences[trained : trained + validated]),
        list(sequences[trained + validated :]),
        "sequences",
    )


def _whole_documents(tokens: Counter[int], order: Sequence[int], wanted: float, largest: float) -> set[int]:
    """Chooses documents of `order` with about `wanted` tokens in total; none if no choice is close."""
    chosen: set[int] = set()
    taken = 0
    for document in order:
        if taken + tokens[document] <= wanted:
            chosen.add(document)
            taken += tokens[document]
    if taken >= wanted / 2:
        return chosen
    fitting = [document for document in sorted(order) if wanted / 2 <= tokens[document] <= largest]
    return set(sorted(fitting, key=lambda document: abs(tokens[document] - wanted))[:1])
