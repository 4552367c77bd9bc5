"""Moves the memory that a session maps while it loads to huge pages of 2 MiB.

A decode step reads every weight once, so on pages of 4 KiB it also waits for 256 address translations per megabyte, and
for longer the more scattered a session's buffers are. ONNX Runtime requests no huge pages; where its buffers are large,
or adjacent in memory, the kernel can still merge them afterwards (`MADV_COLLAPSE`, Linux 6.1, see madvise(2)).
`open_session` loads in `on_huge_pages`. TIDE_HUGE_PAGES=1 turns it on, because loading takes longer
(docs/measurements/huge-pages.md): it pays for long-running programs. It affects speed alone: memory that the kernel
cannot move stays where it is.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("tide_export")

SWITCH = "TIDE_HUGE_PAGES"
MADV_COLLAPSE = 25
HUGE = 1 << 21  # bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB
MAPS = Path("/proc/self/maps")

Range = tuple[int, int]  # addresses, the end exclusive


def huge_pages() -> bool:
    """Whether TIDE_HUGE_PAGES is 1."""
    return os.environ.get(SWITCH) == "1"


@contextmanager
def on_huge_pages() -> Iterator[None]:
    """Moves the memory that the body maps, and still holds when it ends, to huge pages, if TIDE_HUGE_PAGES is 1.

    Takes at least as long as copying that memory once, and one more huge page of memory. Memory that other threads map
    meanwhile is moved too, which does no harm: contents and addresses stay.
    """
    enabled = huge_pages()
    if enabled and not MAPS.exists():
        logger.warning("%s=1 is ignored: it needs Linux and its %s", SWITCH, MAPS)
    if not enabled or not MAPS.exists():
        yield
        return
    before = anonymous_ranges(MAPS.read_text())
    yield
    moved = sum(collapse(each) for each in new_ranges(before, anonymous_ranges(MAPS.read_text())))
    logger.debug("moved up to %d MiB to huge pages", moved >> 20)


def anonymous_ranges(maps: str) -> list[Range]:
    """The writable private memory in a /proc/PID/maps that belongs to no file and no stack, by address."""
    ranges = []
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def new_ranges(before: list[Range], after: list[Range]) -> list[Range]:
    """The parts of `after` that are in none of `before`, both by address, cut to whole huge pages."""
    parts = []
    for start, end in after:
        for old_start, old_end in [*((a, b) for a, b in before if a < end and b > start), (end, end)]:
            first, last = -(-start // HUGE) * HUGE, old_start // HUGE * HUGE
            if first < last:
                parts.append((first, last))
            start = max(start, old_end)
    return parts


def collapse(memory: Range) -> int:
    """Has the kernel move `memory` to huge pages; its size in bytes, or 0 where some of it could not be moved.

    The kernel continues after a part that it cannot move (unused memory, no free huge page).
    """
    start, end = memory
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return end - start if madvise(start, end - start, MADV_COLLAPSE) == 0 else 0
