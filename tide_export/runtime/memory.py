"""Tells how much memory this process may have, and has left."""

from tide_export.runtime.native import library


def memory_limit() -> int:
    """Returns the bytes of memory that this process may have.

    They are the machine's, or what its control groups (cgroup v1 and v2) leave.
    """
    limit: int = library().tide_memory_limit()
    return limit


def memory_left() -> int:
    """Returns how many of these bytes this process does not use yet."""
    left: int = library().tide_memory_left()
    return left
