"""Sets the environment variables of PyTorch's threads and memory, before PyTorch is loaded.

`cli.main.main` calls `prepare` first; a program that calibrates or validates from Python may do the same. This changes
only speed. cpp/src/onnxruntime/session.cpp configures ONNX Runtime's threads.
"""

import os
from pathlib import Path

# Spins, some tens of nanoseconds each, after which an idle thread of GNU OpenMP sleeps: about as long as ONNX Runtime's
# (kSpinMicroseconds in cpp/src/onnxruntime/session.cpp).
SPIN_ROUNDS = 1000
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def prepare() -> None:
    """Sets variables that PyTorch and its OpenMP read when they are loaded, unless the user has set them.

    Idle threads sleep after some 20 microseconds. OpenMP's default is milliseconds, which makes calibration several
    times slower beside another busy program; sleeping at once makes it a third slower on an idle machine. Large tensors
    get huge pages if the kernel has them, because mapping pages of 4 KiB for each batch slows the fit of routers.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
    if HUGE_PAGES.exists():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
