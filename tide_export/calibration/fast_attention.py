"""Attention that runs faster than the reference's while states are collected: part of `collect`.

Everything is held to eager attention, which writes out every score. PyTorch's fused attention gives the same within
rounding in a fraction of the time and memory. Whether it does for the model at hand is looked at before it is used.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tide_export.errors import UnsupportedModelError
from tide_export.model.attention import attention_implementation
from tide_export.model.source import SourceModel

FUSED = "sdpa"
LOOKED_AT = 64  # tokens
ROUNDING = 1e-3  # how far a token's state may be from the reference's, as a share of its length


@contextmanager
def fast_attention(source: SourceModel, text: Sequence[int], layers: Sequence[int]) -> Iterator[str]:
    """While open, `source` attends by PyTorch's fused attention, if that gives the states that its reference gives.

    Args:
        text: token ids of which the first are run both ways.
        layers: counts of layers after which the states are compared.

    Yields:
        the name of the attention in use.
    """
    reference = str(source.model.config._attn_implementation)
    if reference != "eager" or not _agrees(source, text, layers):
        yield reference
        return
    with attention_implementation(source.model, FUSED):
        yield FUSED


def _agrees(source: SourceModel, text: Sequence[int], layers: Sequence[int]) -> bool:
    ids = torch.tensor([list(text[:LOOKED_AT])], dtype=torch.long, device=source.device)
    expected = source.run(ids, layers).raw
    try:
        with attention_implementation(source.model, FUSED):
            found = source.run(ids, layers).raw
    except UnsupportedModelError:  # softcaps, sinks: transformers says which models it cannot serve
        return False
    return all(
        bool(((found[layer] - state).norm(dim=-1) <= ROUNDING * state.norm(dim=-1)).all())
        for layer, state in expected.items()
    )
