"""Writes files atomically, so that neither a full disk nor a killed process leaves half of one.

`replace_files` is for contents in memory (router files, reports, manifests); `bundle.store` writes whole folders.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tide_export.errors import TideError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
FULL_BYTES = 2**20  # a disk with less free space counts as full when a library failed to write there
TEMPORARY = "tide-tmp"


def user_cache() -> Path:
    """Returns the user's cache folder, whose files may be deleted at any time.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tide_export"


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Writes every file under a temporary name, flushes it to disk, then renames all of them.

    Readers see each file's old or new content, never a part. A failure before the first rename changes no file. A
    replaced file keeps its mode. Temporary files of killed processes are removed.

    Raises:
        OSError: a file cannot be written; `failure` describes the error.
    """
    temporaries = {file: _temporary(file) for file in contents}
    try:
        for file, content in contents.items():
            _remove_leftovers(file)
            _write_new(temporaries[file], content)
            with contextlib.suppress(FileNotFoundError):
                temporaries[file].chmod(file.stat().st_mode & 0o7777)
        for file in contents:
            temporaries[file].replace(file)
        for folder in {file.parent for file in contents}:
            fsync(folder)
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def lock(descriptor: int, what: str, error: type[TideError]) -> None:
    """Locks an open file or folder until it is closed or the process dies.

    A file system without locks gives none.

    Raises:
        error: another run holds the lock: `what` is in use.
    """
    import fcntl  # here, as running a bundle must work without it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise error(f"{what} is in use by another run: wait for its end, or give another --cache") from None
    except OSError as reason:
        if reason.errno not in NO_LOCKS:
            raise


def check_writable(file: Path) -> None:
    """Writes and removes a temporary file, because permissions do not show a read-only file system.

    Raises:
        OSError: `replace_files` cannot write `file`.
    """
    temporary = _temporary(file)
    try:
        _write_new(temporary, b"")
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def fsync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failure(error: BaseException, folder: Path) -> str:
    """Returns why a file in `folder` could not be written, for an error message."""
    if is_no_space(error, folder):
        return "no space left on the disk"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def is_no_space(error: BaseException | None, folder: Path) -> bool:
    """Returns whether a full disk, quota or file-size limit caused `error`.

    Libraries in C++ or Rust keep at most the text of the error code (safetensors, tokenizers), or nothing (numpy,
    protobuf). So for errors that are not `TideError`, a full disk under `folder` counts too.
    """
    ours = isinstance(error, TideError)
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if any(os.strerror(code) in str(error) for code in NO_SPACE) or _is_short_write(error):
            return True
        error = error.__cause__ or error.__context__
    return not ours and _is_full(folder)


def _is_short_write(error: BaseException) -> bool:
    """Returns whether numpy's `tofile` wrote fewer bytes than it was given."""
    return bool(re.search(r"\d+ requested and \d+ written|problem writing element \d+ to file", str(error)))


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}.{TEMPORARY}")


def _write_new(file: Path, content: bytes) -> None:
    """Creates a file, unlinks what has its name, and follows no link that appears meanwhile."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _remove_leftovers(file: Path) -> None:
    """Removes the temporary files of processes that have ended."""
    pattern = re.compile(re.escape(f".{file.name}.") + r"(\d+)" + re.escape(f".{TEMPORARY}"))
    for entry in file.parent.iterdir():
        if (match := pattern.fullmatch(entry.name)) and not _is_running(int(match[1])):
            with contextlib.suppress(OSError):
                entry.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
