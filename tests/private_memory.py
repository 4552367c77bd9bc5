"""Watches the memory of this process that belongs to no file: what the system cannot take back."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS = 0.002  # between samples


def private_memory(*_held: object) -> int:
    """Resident bytes that belong to no file, with these objects in memory."""
    gc.collect(1)  # young objects: all take seconds in a process of many tests
    return _private()


@dataclass
class Gained:
    """The most private memory beyond that at the start."""

    bytes: int = 0


@contextmanager
def peak_of_private_memory() -> Iterator[Gained]:
    """While open, samples private memory; memory that earlier work left free is returned before."""
    gc.collect(1)
    ctypes.CDLL(None).malloc_trim(0)
    before, gained, done = _private(), Gained(), threading.Event()

    def sample() -> None:
        while not done.wait(SECONDS):
            gained.bytes = max(gained.bytes, _private() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield gained
    finally:
        done.set()
        thread.join()


def _private() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
