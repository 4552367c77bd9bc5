"""Chooses the tokens that a drafter can propose."""

from collections.abc import Iterable

import numpy as np

from tide_export.drafting.store import Answer

PROMPT_WEIGHT = 0.2  # weight of a prompt's token; an answer's token has 1


def frequent_tokens(answers: Iterable[Answer], size: int, known: int) -> np.ndarray:
    """Returns the most frequent tokens of prompts and answers, ascending, int64 [n].

    Unseen tokens follow in the order of their ids where there are fewer than `size`.

    Args:
        size: maximum number of tokens.
        known: size of the model's vocabulary.
    """
    counts = np.zeros(known)
    for answer in answers:
        np.add.at(counts, answer.ids[: answer.prompt], PROMPT_WEIGHT)
        np.add.at(counts, answer.ids[answer.prompt :], 1.0)
    return np.sort(np.argsort(-counts, kind="stable")[: min(size, known)]).astype(np.int64)
