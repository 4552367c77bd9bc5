"""The functions that a test gives to `GenerationConfig`, which tests/cpp/hooks.cpp has in C++ too."""

import numpy as np


def parity(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Even and odd tokens by turns."""
    logits[(len(ids) + 1) % 2 :: 2] = -np.inf
    return logits


def latest(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """The latest tokens are less likely."""
    logits[list(set(ids[-4:]))] -= 0.5
    return logits


def none(ids: list[int], logits: np.ndarray) -> np.ndarray:
    return np.full_like(logits, -np.inf)


def throws(ids: list[int], logits: np.ndarray) -> np.ndarray:
    raise RuntimeError("no rule fits\nand more")
