"""Traces attention to chosen keys as attention to all.

It is that for sequences that are short enough.

Some models (DeepSeek V3.2, GLM 5, MiniMax M3, Qwen 4) have an indexer beside each attention, which scores all keys for
every query; the best N alone are attended to. Of N keys or fewer these are all, and `pipeline.preflight` allows no
longer sequences. Doge chooses by what its tokens add to the scores, without an indexer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

ALL_KEYS = (1,)  # shape of what stands for an indexer's choice


def chosen_keys(model: PreTrainedModel) -> dict[nn.Module, int]:
    """The model's indexers, and how many keys each chooses for a query."""
    found = {}
    for module in model.modules():
        if isinstance(count := getattr(module, "index_topk", getattr(module, "token_budget", None)), int):
            found[module] = count
        elif isinstance(blocks := getattr(module, "topk_blocks", None), int):
            found[module] = blocks * int(module.block_size)  # type: ignore[arg-type]
    return found


def max_keys(model: PreTrainedModel) -> int | None:
    """How many keys a query attends to at most; None if to all that its masks show."""
    kept = (getattr(module, "keep_window_size", None) for module in model.modules())
    return min([*chosen_keys(model).values(), *(count for count in kept if isinstance(count, int))], default=None)


@contextmanager
def without_indexers(model: PreTrainedModel) -> Iterator[None]:
    """While open, indexers compute nothing: attention that is replaced reads no choice."""

    def choose(hidden_states: torch.Tensor, *_, **__) -> torch.Tensor:
        return hidden_states.new_zeros(ALL_KEYS, dtype=torch.int32)

    indexers = list(chosen_keys(model))
    try:
        for indexer in indexers:
            indexer.forward = choose
        yield
    finally:
        for indexer in indexers:
            del indexer.forward
