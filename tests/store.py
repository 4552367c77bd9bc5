"""A folder that outlives a run of the tests, for what is dear to make: traces, and what compilers make.

Whatever is in it may be deleted at any time. Who keeps something there names it by what it depends on, finds what an
interrupted run has left, and makes it while it holds a lock (`locked`): several runs may use one folder.
"""

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "TIDE_TEST_STORE"
ROOT = Path(__file__).parents[1]
LEAST = 1 << 30  # bytes that must be free


def store() -> Path:
    """The folder that TIDE_TEST_STORE names, else out/test-store of this checkout.

    Where it cannot be written a warning is printed, and this process and those that it starts use a temporary folder,
    which ends with this process.
    """
    folder = Path(os.environ.get(VARIABLE) or ROOT / "out" / "test-store")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if shutil.disk_usage(folder).free < LEAST:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="tide-test-store-"))
        reason = error.strerror or error
        print(f"warning: nothing is kept in {folder} for the next run of the tests: {reason}", file=sys.stderr)
        os.environ[VARIABLE] = str(temporary)
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Holds the lock `path`.lock, whose file descriptor is given: processes that inherit it hold the lock too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
