"""Sets the environment variables of PyTorch's threads and memory, which must be set before it is loaded.

`cli.main.main` calls `prepare` first; a program that calibrates or validates from Python may do the same. It changes
only speed. ONNX Runtime's threads are configured in cpp/src/onnxruntime/session.cpp.
"""

import os
from pathlib import Path

# Rounds, some tens of nanoseconds each, in which a thread of GNU OpenMP waits for work before it sleeps: about as long
# as ONNX Runtime's do (kSpinMicroseconds of cpp/src/onnxruntime/session.cpp).
SPIN_ROUNDS = 1000
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def prepare() -> None:
    """Sets variables that PyTorch and its OpenMP read when they are loaded, unless the user has set them.

    Threads wait some 20 microseconds for work before they sleep. OpenMP's default is milliseconds, which beside another
    busy program makes calibration several times slower; not waiting makes it a third slower on an idle machine. Large
    tensors get huge pages, if the kernel has them: they are allocated and freed batch after batch, and mapping their
    pages of 4 KiB took a good part of the time of fitting routers.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
    if HUGE_PAGES.exists():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
