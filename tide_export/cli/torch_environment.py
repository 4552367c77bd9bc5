"""How PyTorch's threads wait and where its memory lies: variables that must be set before it is loaded.

`cli.main.main` calls `prepare` first; a program that calibrates or validates from Python may do the same. It is about
speed alone. ONNX Runtime's threads are told how to wait in `runtime.onnxruntime.session`.
"""

import os
from pathlib import Path

# Rounds, some tens of nanoseconds each, in which a thread of GNU OpenMP waits for work before it sleeps: about as long
# as ONNX Runtime's are told to (`runtime.onnxruntime.library.SPIN_MICROSECONDS`), and for the same reason.
SPIN_ROUNDS = 1000
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def prepare() -> None:
    """Sets what PyTorch and its OpenMP read when they are loaded; what the user has set stays as it is.

    Threads wait some 20 microseconds for work before they sleep. OpenMP's own default is milliseconds, which beside
    another busy program makes calibration several times slower; not at all makes it a third slower where nothing else
    runs. And large tensors ask for huge pages, where the kernel has them: they are allocated and freed batch after
    batch, and handing out their pages of 4 KiB took a good part of the time of fitting routers.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
    if HUGE_PAGES.exists():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
