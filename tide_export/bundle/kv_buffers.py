"""Computes the size of the segment networks' K/V buffers, and the bytes that a run copies and reads.

TensorRT updates K/V in place only in contiguous buffers of a fixed length: its operator has one mode,
`KVCacheMode::kLINEAR`, whose cache must have a static length (NvInfer.h of TensorRT 11.1; TensorRT for RTX 1.7.1), and
its attention takes lengths and no page table. So a sequence holds all rows of its buffers from its first token on. In
plans of TensorRT for RTX 1.7.1 each run copies keys and values of every row once into the layout that attention reads;
a fused kernel then reads the blocks of 64 rows that are not masked, any other kernel all rows. Sliding windows, which
mask more, are not subtracted, because a manifest does not record them.
"""

from dataclasses import dataclass

from tide_export.bundle.manifest import Manifest
from tide_export.names.networks import segment_name

DEFAULT_CONTEXT = 1024  # tokens in the K/V for which a step is described, if the buffers hold twice as many
BLOCK_ROWS = 64  # rows that a fused attention skips together if they are masked


@dataclass(frozen=True)
class KvBuffers:
    """The bytes of some layers' K/V for one sequence."""

    held: int  # on the GPU, however short the sequence is
    copied: int  # by each run; it reads and writes as many
    read: int  # of the copies, by each run's attention


def default_context(capacity: int) -> int:
    """Returns the tokens in the K/V for which a step is described: DEFAULT_CONTEXT, or half the buffers."""
    return min(DEFAULT_CONTEXT, max(1, capacity // 2))


def is_fused(manifest: Manifest, k: int, attentions: int | None = None) -> bool:
    """Returns whether one kernel computes each attention of segment k.

    The builder's report tells it; without plans, it is assumed of all precisions but float32.

    Args:
        attentions: number of attention operators of the segment's network; None: one per attention.
    """
    info, plans, sizes = manifest.networks, manifest.engines, manifest.segment_sizes
    assert info is not None
    expected = len(manifest.model.attentions(range(sum(sizes[:k]), sum(sizes[: k + 1]))))
    if plans is not None and plans.built is not None:
        return plans.built[segment_name(k)].fused_attention_layers == expected
    return info.weights != "fp32" and attentions in (None, expected)


def kv_buffers(manifest: Manifest, layers: range, context: int, fused: bool) -> KvBuffers:
    """Computes the bytes of some layers' K/V in the segment networks, which the manifest must have.

    Args:
        layers: the layers of one network, or of all.
        context: tokens in the buffers, including the new one.
        fused: whether one kernel computes an attention.
    """
    info, shapes = manifest.networks, manifest.model.kv_shapes
    assert info is not None
    item = 4 if info.weights == "fp32" else 2

    def size(which: list[int], rows: int) -> int:
        return 2 * sum(shapes[i][0] * shapes[i][1] for i in which) * item * rows

    sources = manifest.model.kv_read(layers)  # fewer than attentions where several read the same K/V
    rows = min(info.capacity, -(-context // BLOCK_ROWS) * BLOCK_ROWS) if fused else info.capacity
    attentions = manifest.model.attentions(layers)
    stored = [i for i in sources if i in attentions]
    copied = 0 if manifest.has_cuda_networks else size(sources, info.capacity)
    return KvBuffers(size(stored, info.capacity), copied, size(attentions, rows))
