"""Loads a model's own Python code written for transformers 4, as Ouro's was (arXiv 2510.25741).

Such code looks up rotary embeddings by the name "default", and gives the functions that make masks `input_embeds` and
`cache_position`. transformers 5 has the embeddings in each model's class, and calls the one `inputs_embeds`; the other
follows from the cache.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

ROPE = "default"
MASKS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)


@contextmanager
def older_code() -> Iterator[None]:
    """While open, code that is imported finds what transformers 4 had, and models can be made of it."""
    known, masks = ROPE in ROPE_INIT_FUNCTIONS, {name: getattr(masking_utils, name) for name in MASKS}
    ROPE_INIT_FUNCTIONS.setdefault(ROPE, _rotary_rates)
    for name, make in masks.items():
        setattr(masking_utils, name, _with_older_arguments(make))
    try:
        yield
    finally:
        for name, make in masks.items():
            setattr(masking_utils, name, make)
        if not known:
            del ROPE_INIT_FUNCTIONS[ROPE]


def _rotary_rates(config: Any, device: Any = None, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Returns the angle per position of each pair of a head's features [size / 2], and attention's factor."""
    if getattr(config, "rope_parameters", None) is None:
        config.standardize_rope_params()
    return PhiRotaryEmbedding.compute_default_rope_parameters(config, device)


def _with_older_arguments(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `make` with the arguments that it had in transformers 4."""

    @functools.wraps(make)
    def made(*given: Any, **named: Any) -> Any:
        if "input_embeds" in named:
            named["inputs_embeds"] = named.pop("input_embeds")
        named.pop("cache_position", None)
        return make(*given, **named)

    return made
