"""Holds still, while a model is traced, what would otherwise depend on the tokens at hand.

Two things. *Rotary tables of a length*: "dynamic" and "longrope" scaling compute their angles from the longest position
of the pass. Up to the length the model was first made for they are those of a short pass, and a bundle holds no longer
sequences (`SourceModel.context_length`), so the switch is taken out and the short angles are traced. *Positions*: a
layer that counts its own tokens asks the K/V cache how many came before; the cache here holds nothing and answers with
the first position id.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

SWITCHING = ("dynamic", "longrope")  # rope types whose angles depend on the length of the pass


@contextmanager
def short_rotary(model: nn.Module) -> Iterator[None]:
    """While open, rotary modules of a switching type give the angles of a short pass and do not switch."""
    held: list[tuple[Any, str | dict[str, str], dict[str, torch.Tensor]]] = []
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        types = kinds if isinstance(kinds, dict) else {"": kinds}
        switching = [name for name, kind in types.items() if isinstance(kind, str) and kind in SWITCHING]
        if not switching or kinds is None:
            continue
        prefixes = [f"{name}_" if name else "" for name in switching]
        held.append((module, kinds, {f"{p}inv_freq": getattr(module, f"{p}inv_freq") for p in prefixes}))
        for prefix in prefixes:
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
        still = {name: "default" if name in switching else kind for name, kind in types.items()}
        module.rope_type = still if isinstance(kinds, dict) else "default"
    try:
        yield
    finally:
        for module, kinds, frequencies in held:
            module.rope_type = kinds
            for name, value in frequencies.items():
                setattr(module, name, value)


def passing_cache(layers: int, first_position: torch.Tensor) -> Cache:
    """A cache for one traced pass: keys and values go through it, and `first_position` tokens came before."""
    return Cache(layers=[_Passing(first_position) for _ in range(layers)])


class _Passing(CacheLayerMixin):
    def __init__(self, first_position: torch.Tensor):
        super().__init__()
        self.first_position = first_position

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        return self.first_position

    def get_max_length(self) -> int:
        return -1
