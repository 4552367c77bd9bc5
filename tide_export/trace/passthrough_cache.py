"""A K/V cache for a traced pass, which holds a whole sequence: stores nothing and is always empty."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


def passthrough_cache(layers: int) -> Cache:
    """A cache of `layers` layers."""
    return Cache(layers=[_PassthroughLayer() for _ in range(layers)])


class _PassthroughLayer(CacheLayerMixin):
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
