"""Writes files for users in one step, so that neither a full disk nor a kill leaves half of one.

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
FULL_BYTES = 2**20  # with less free space a disk counts as full, when a library failed to write there
TEMPORARY = "tide-tmp"


def user_cache() -> Path:
    """The user's folder for what may be deleted at any time: it is then measured or computed again.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tide_export"


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Writes every file under a temporary name beside it, flushes it to the disk, then renames all of them.

    Each file is seen as it was or as it becomes; after a failure before the first rename, all stay as they were. A
    file that is replaced keeps its mode. Temporary files of killed processes are removed.

    Raises:
        OSError: a file cannot be written; `failure` describes it in words.
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


def check_writable(file: Path) -> None:
    """Writes and removes the temporary file of `replace_files`: permissions do not show a read-only file system.

    Raises:
        OSError: `replace_files` could not write `file`.
    """
    temporary = _temporary(file)
    try:
        _write_new(temporary, b"")
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def fsync(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failure(error: BaseException, folder: Path) -> str:
    """Describes why a file in `folder` could not be written, in words."""
    if is_no_space(error, folder):
        return "no space left on the disk"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def is_no_space(error: BaseException | None, folder: Path) -> bool:
    """Whether a full disk, quota or file-size limit caused `error`.

    Libraries that write in C++ or Rust keep the words of the error code at most (safetensors, tokenizers) and not even
    those always (numpy, protobuf). So the free space on the disk of `folder` counts too, for errors that are not ours.
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
    """Whether numpy wrote less than it was given (`tofile`, of numbers and of objects)."""
    return bool(re.search(r"\d+ requested and \d+ written|problem writing element \d+ to file", str(error)))


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}.{TEMPORARY}")


def _write_new(file: Path, content: bytes) -> None:
    """Writes a file that is made here: what has its name is unlinked, and a link planted since then not followed."""
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
