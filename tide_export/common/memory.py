"""Returns freed memory to the system, of which glibc would keep most in its heap."""

import ctypes
import gc


def return_free_memory() -> None:
    """Frees what nothing refers to, and returns all freed memory of the process."""
    gc.collect()
    _trim()


class FreeMemory:
    """Returns freed memory each time that temporary tensors of `SHARE` bytes have come and gone."""

    SHARE = 2**28

    def __init__(self) -> None:
        self._used = 0

    def used(self, count: int) -> None:
        """Counts `count` bytes."""
        self._used += count
        if self._used >= self.SHARE:
            self._used = 0
            _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
