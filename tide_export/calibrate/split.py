"""Parts sequences into training and validation, between documents wherever there are enough: part of `calibrate`.

Tokens of one document resemble each other, so a router that is validated on a document it was fitted to looks better
than it is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_export.calibrate.sequences import TokenSequence
from tide_export.errors import CalibrationError


@dataclass(frozen=True)
class Split:
    """Training and validation sequences; `unit` is "documents", or "sequences" where the documents were too few."""

    train: list[TokenSequence]
    validation: list[TokenSequence]
    unit: str


def split_sequences(sequences: Sequence[TokenSequence], fraction: float, seed: int) -> Split:
    """Takes whole documents for validation, in an order drawn by `seed`, while they fit in `fraction` of the tokens.

    Where that gives less than half of the fraction (few or long documents), the one document nearest to it is taken, if
    it has no more than half of all tokens; and if there is none, the last sequences.

    Raises:
        CalibrationError: fewer than two sequences.
    """
    if len(sequences) < 2:
        raise CalibrationError(
            f"the dataset gives {len(sequences)} sequence: routers need at least 2, one of them to validate on"
        )
    tokens: Counter[int] = Counter()
    for sequence in sequences:
        tokens[sequence.document] += len(sequence.ids)
    wanted = fraction * tokens.total()
    chosen: set[int] = set()
    taken = 0
    for document in np.random.default_rng(seed).permutation(sorted(tokens)).tolist():
        if taken + tokens[document] <= wanted:
            chosen.add(document)
            taken += tokens[document]
    if taken < wanted / 2:
        fitting = [document for document, size in tokens.items() if wanted / 2 <= size <= tokens.total() / 2]
        chosen = set(sorted(fitting, key=lambda document: abs(tokens[document] - wanted))[:1])
    if chosen:
        train = [sequence for sequence in sequences if sequence.document not in chosen]
        return Split(train, [sequence for sequence in sequences if sequence.document in chosen], "documents")
    kept = len(sequences) - max(1, round(fraction * len(sequences)))
    return Split(list(sequences[: max(1, kept)]), list(sequences[max(1, kept) :]), "sequences")
