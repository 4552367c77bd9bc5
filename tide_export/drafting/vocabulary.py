"""Chooses the tokens that a drafter can propose."""

from collections.abc import Iterable

import numpy as np

from tide_export.drafting.store import Answer

PROMPT_WEIGHT = 0.2  # of a token of a prompt; one of an answer has 1


def frequent_tokens(answers: Iterable[Answer], size: int, known: int) -> np.ndarray:
    """Returns the most frequent tokens of answers, filled up with the tokenizer's first ones, ascending, int64 [n].

    Args:
        size: how many, at most.
        known: tokens of the model.
    """
    counts = np.zeros(known)
    for answer in answers:
        np.add.at(counts, answer.ids[: answer.prompt], PROMPT_WEIGHT)
        np.add.at(counts, answer.ids[answer.prompt :], 1.0)
    return np.sort(np.argsort(-counts, kind="stable")[: min(size, known)]).astype(np.int64)
