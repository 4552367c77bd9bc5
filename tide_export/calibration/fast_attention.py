"""Replaces eager attention by PyTorch's fused attention while hidden states are collected.

The reference is eager attention, which stores every score. Fused attention equals it up to rounding in a fraction of
the time and memory, and is compared with it before use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tide_export.errors import UnsupportedModelError
from tide_export.model.attention import attention_implementation
from tide_export.model.source import SourceModel

FUSED = "sdpa"
COMPARED_TOKENS = 64
TOLERANCE = 1e-3  # maximum distance of a token's hidden state from the reference's, relative to its norm


@contextmanager
def fast_attention(source: SourceModel, text: Sequence[int], layers: Sequence[int]) -> Iterator[str]:
    """Makes `source` use fused attention while the context is open, if it passes the comparison.

    Args:
        text: token ids, the first of which run with both attentions.
        layers: numbers of layers after which the hidden states are compared.

    Yields:
        The name of the attention in use.
    """
    reference = str(source.model.config._attn_implementation)
    if reference != "eager" or not _agrees(source, text, layers):
        yield reference
        return
    with attention_implementation(source.model, FUSED):
        yield FUSED


def _agrees(source: SourceModel, text: Sequence[int], layers: Sequence[int]) -> bool:
    ids = torch.tensor([list(text[:COMPARED_TOKENS])], dtype=torch.long, device=source.device)
    expected = source.run(ids, layers).raw
    try:
        with attention_implementation(source.model, FUSED):
            fused = source.run(ids, layers).raw
    except UnsupportedModelError:  # softcaps, sinks: transformers refuses fused attention for such models
        return False
    return all(
        bool(((fused[layer] - hidden).norm(dim=-1) <= TOLERANCE * hidden.norm(dim=-1)).all())
        for layer, hidden in expected.items()
    )
