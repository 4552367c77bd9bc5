"""Freed memory is returned to the system, which the C library would keep."""

from private_memory import private_memory

from tide_export.common.memory import FreeMemory, return_free_memory


def test_freed_memory_is_returned_each_time_that_a_share_was_used() -> None:
    return_free_memory()
    before = private_memory()
    blocks = [b"x" * 100_000 for _ in range(1000)]
    kept = blocks[::50]  # between the others, so that the C library cannot shrink its heap
    del blocks
    free = FreeMemory()
    free.used(FreeMemory.SHARE - 1)
    assert private_memory(kept) - before > 50 << 20
    free.used(1)
    assert private_memory(kept) - before < 20 << 20
    free.used(FreeMemory.SHARE - 1)
    blocks = [b"x" * 100_000 for _ in range(1000)]
    del blocks[::50]
    assert private_memory(blocks) - before > 50 << 20, "memory in use stays"
