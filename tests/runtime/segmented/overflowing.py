"""Fills what a sequence has written with NaN, as a model that overflows does."""

import ctypes

from tide_export import names
from tide_export.runtime.segmented.memory import SegmentBuffers
from tide_export.runtime.network_spec import kv_buffers


def overflow_slot(buffers: SegmentBuffers, slot: int) -> None:
    """All of a slot's K/V that has been written, its pending states and its exit states."""
    buffers._device.synchronize()
    written = buffers._written[slot]
    for k, of_segment in enumerate(buffers._buffers):
        spec = buffers._specs[names.segment(k)]
        for kv in kv_buffers(spec):
            for head in range(kv.heads):
                start = of_segment[kv.name].address + slot * kv.bytes + head * kv.capacity * kv.size
                ctypes.memset(start, 0xFF, written * kv.size)
        for name in (names.NEXT_PENDING_STATES, names.EXIT_STATES):
            if name in of_segment:
                size = spec.inputs[name].size()
                rows = min(written, buffers._info.state_rows)
                ctypes.memset(of_segment[name].address + slot * size, 0xFF, rows * (size // buffers._info.state_rows))
