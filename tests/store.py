"""The folder of what is kept from one run of the tests to the next: traces, compiled programs.

It is TIDE_TEST_STORE, or out/test-store of this checkout. It may be deleted at any time but while tests run. Several
runs may use it at once: what makes an entry holds a lock, and puts it in place by renaming.
"""

import functools
import os
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def store() -> Path:
    """The folder; where it cannot be written to, a folder of this run, with a warning."""
    folder = Path(os.environ.get("TIDE_TEST_STORE") or ROOT / "out" / "test-store")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        warnings.warn(f"nothing is kept from this run of the tests: {error}", stacklevel=2)
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # the same for all workers
        folder = Path(tempfile.gettempdir()) / f"tide-test-store-{run}"
        folder.mkdir(exist_ok=True)
    return folder
