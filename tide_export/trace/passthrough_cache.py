"""A K/V cache for a traced pass: stores nothing and reports the first position id as its length.

Layers that count their own tokens ask the cache how many came before.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


def passthrough_cache(layers: int, first_position: torch.Tensor) -> Cache:
    """A cache of `layers` layers for a pass whose first token is at `first_position` (int64 [])."""
    return Cache(layers=[_PassthroughLayer(first_position) for _ in range(layers)])


class _PassthroughLayer(CacheLayerMixin):
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
