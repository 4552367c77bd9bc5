"""Verifies the files of an open bundle while an engine is made of it, and remembers large ones that it verified.

Hashing the weights takes longer than mapping them. So a thread hashes large files while the body of `verifying` runs,
and a file that this user verified before is not hashed again: it is the same inode with the same size and times. Its
time of change (ctime) cannot be set back, so that copies, edits and restored files are hashed. What this does not
notice is a disk that returns other bytes than were written; `tide-export inspect` and `validate` hash everything.
The newest notes are kept; a file whose note is gone is hashed again.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tide_export.bundle.manifest import FileInfo
from tide_export.bundle.opened import Bundle, BundleFile
from tide_export.files import user_cache

LARGE = 4 << 20  # bytes; smaller files are hashed in milliseconds, and each time
KEPT = 1000  # notes


@contextlib.contextmanager
def verifying(bundle: Bundle) -> Iterator[None]:
    """Compares the sha256 of every file with the manifest: of small ones before the body, of large ones by its end.

    Raises:
        BundleError: naming a file that is corrupt, also where the body raises for that reason.
    """
    large = []
    for name, expected in bundle.manifest.files.items():
        if expected.size < LARGE:
            bundle.files[name].check(expected, verify=True)
        elif (note := _note(bundle.files[name], expected)) is None or not note.exists():
            large.append((bundle.files[name], expected))
    with ThreadPoolExecutor(1) as executor:
        checks = [executor.submit(_verify, *item) for item in large]
        try:
            yield
        finally:
            for check in checks:
                check.result()


def _verify(file: BundleFile, expected: FileInfo) -> None:
    note = _note(file, expected)  # before: a file that is written meanwhile has another one
    file.check(expected, verify=True)
    if note is None:
        return
    with contextlib.suppress(OSError):  # it is then hashed again the next time
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
        notes = sorted(note.parent.iterdir(), key=lambda other: other.stat().st_mtime_ns)
        for old in notes[:-KEPT]:
            old.unlink()


def _note(file: BundleFile, expected: FileInfo) -> Path | None:
    """The empty file that says that `file` was verified, named as by the C++ runtime; None where there is no home."""
    name = hashlib.sha256(f"{file.identity} {expected.sha256}".encode()).hexdigest()
    try:
        return user_cache() / "verified" / name
    except RuntimeError:
        return None
