"""Weights on huge pages: what a session maps while it loads is moved to pages of 2 MiB before its first step.

A decode step reads every weight once, so on pages of 4 KiB it also waits for 256 address translations a megabyte, and
for longer the less neatly a session's buffers lie beside each other. ONNX Runtime asks the system for no huge pages;
where its buffers are large, or follow each other in memory, the kernel can still merge them afterwards
(`MADV_COLLAPSE`, Linux 6.1, see madvise(2)). `session` wraps the loading of a session in `on_huge_pages`. It is asked
for with TIDE_HUGE_PAGES=1, because loading takes longer by it (docs/measurements/huge-pages.md): it pays for
long-running programs.
It is about speed alone: memory that the kernel cannot move stays where it is.
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


@contextmanager
def on_huge_pages() -> Iterator[None]:
    """Moves the memory that the body maps, and still holds when it ends, to huge pages.

    Does nothing unless it was asked for. Takes at least as long as copying that memory once, and no more than a huge
    page beside it. What other threads map meanwhile is moved too, which does no harm: contents and addresses stay.
    """
    asked = os.environ.get(SWITCH) == "1"
    if asked and not MAPS.exists():
        logger.warning("%s=1 is ignored: it needs Linux and its %s", SWITCH, MAPS)
    if not asked or not MAPS.exists():
        yield
        return
    before = anonymous_ranges(MAPS.read_text())
    yield
    moved = sum(collapse(each) for each in new_ranges(before, anonymous_ranges(MAPS.read_text())))
    logger.debug("moved up to %d MiB to huge pages", moved >> 20)


def anonymous_ranges(maps: str) -> list[Range]:
    """The writable private memory in a /proc/PID/maps that is no file's and no stack's, by address."""
    ranges = []
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def new_ranges(before: list[Range], after: list[Range]) -> list[Range]:
    """The parts of `after` that lie in none of `before`, both by address, cut to whole huge pages."""
    found = []
    for start, end in after:
        for old_start, old_end in [*((a, b) for a, b in before if a < end and b > start), (end, end)]:
            first, last = -(-start // HUGE) * HUGE, old_start // HUGE * HUGE
            if first < last:
                found.append((first, last))
            start = max(start, old_end)
    return found


def collapse(memory: Range) -> int:
    """Asks the kernel to put whole huge pages at `memory`; the bytes of it, or 0 where some of it could not be moved.

    The kernel goes on behind a part that it cannot move (nothing of it in use yet, no free huge page).
    """
    start, end = memory
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return end - start if madvise(start, end - start, MADV_COLLAPSE) == 0 else 0
