"""A cache for a pass over a whole sequence: stores nothing and is always empty."""

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from tide_export.model.source import SourceModel

MAX_STATES = 8  # of one kind in a layer

Change = Callable[[torch.Tensor], torch.Tensor]


def cache_layers(source: SourceModel) -> int:
    """Returns the layers of a cache for `source`, whose config may count attentions or more layers."""
    return max(source.num_layers, getattr(source.text_config, "num_hidden_layers", None) or 0)


def passthrough_cache(layers: int, change: Change = lambda values: values) -> Cache:
    """Holds nothing for `layers` layers.

    `change`: from keys or values [B, heads, S, D] to those that attention reads.
    """
    return Cache(layers=[_PassthroughLayer(change) for _ in range(layers)])


class _PassthroughLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):  # type: ignore[override]
    indexer_position_ids: torch.Tensor | None = None  # of earlier tokens (Qwen 4)

    def __init__(self, change: Change):
        CacheLayerMixin.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=MAX_STATES)
        self.change = change

    def lazy_initialization(self, *args, **kwargs) -> None:
        self.is_initialized = True

    def update_conv_state(self, conv_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return recurrent_states

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return self.change(key_states), self.change(value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
