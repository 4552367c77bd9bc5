"""Makes the source model round keys and values to int8, as reference of a bundle with K/V in int8."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tide_export.bundle.manifest import INT8_KV, Manifest
from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel
from tide_export.trace.passthrough_cache import cache_layers, passthrough_cache


@contextmanager
def rounded_kv(source: SourceModel, manifest: Manifest) -> Iterator[None]:
    """Makes `source` compute with keys and values as the bundle's K/V cache holds them, while open.

    Raises:
        UnsupportedModelError: the model does not pass its keys and values to transformers' cache, or only what they
            are computed from (latent attention).
    """
    if manifest.kv_dtype != INT8_KV:
        yield
        return
    used = set[str]()
    heads, widths = map(set, zip(*manifest.model.kv_shapes, strict=True))
    refusal = UnsupportedModelError(
        f"{source.architecture} does not give its keys and values to transformers' cache, so that kv_cache int8 "
        "cannot be compared with it: export with --kv-cache float32"
    )

    def change(values: torch.Tensor) -> torch.Tensor:
        if values.shape[1] not in heads and values.shape[3] not in widths:
            raise refusal
        used.add("rounded")
        return round_to_int8(values)

    def give_cache(_module, args, kwargs):
        used.add("called")
        return args, kwargs | {"past_key_values": passthrough_cache(cache_layers(source), change)}

    handle = source.model.register_forward_pre_hook(give_cache, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if used == {"called"}:
        raise refusal


def round_to_int8(values: torch.Tensor) -> torch.Tensor:
    """Rounds each row of [.., D] to int8, with the largest magnitude over 127 as its scale, and back."""
    largest = values.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return torch.round(values * inverse) * (largest / 127)
