"""Opens a bundle with every file checked, and holds the files open.

`runtime.engine.load` calls `open_bundle`, which opens every file once, compares it with the size and sha256 in
`tide.json`, and keeps its descriptor, which the library duplicates. An engine reads some files long after that: the
drafter when the first request drafts. It reads them from the descriptors, so that replacing, moving or deleting the
folder has no effect on it. Needs only the standard library.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.manifest import FileInfo, Manifest, check_size
from tide_export.errors import BundleError

ATTEMPTS = 100  # to open a bundle while exports replace it; each failure needs a replacement meanwhile
MAX_TEXT_BYTES = 1 << 22  # of a file that is read as text
CHUNK = 1 << 20  # bytes hashed at a time
ADVICE = "export the bundle again or copy it anew"


class BundleFile:
    """A file of a bundle, open for reading until the last reference to it is gone.

    It stays readable and unchanged when its folder is replaced, moved or deleted. Every read checks size and
    modification time before and after, to notice a file that is overwritten in place; changes that restore both (`cp
    -p` of another file onto it) and disk errors are not noticed. Safe to use from several threads.

    Attributes:
        path: where it was opened, for messages: another file may have that path by now.
        descriptor: of the open file.
        size: in bytes.
    """

    def __init__(self, path: Path, folder: int, name: str) -> None:
        """Opens `name`, relative to the descriptor `folder`, without following a symbolic link.

        Raises:
            BundleError: it is missing, a symbolic link, not a regular file or unreadable.
        """
        self.path = path
        try:
            self.descriptor = _open(folder, name)
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(f"bundle file '{path}' is missing; {ADVICE}") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise BundleError(
                    f"bundle file '{path}' is a symbolic link, or in a folder that is one: copy the bundle with the "
                    "files themselves (cp -rL)"
                ) from None
            raise BundleError(f"cannot read bundle file '{path}': {error.strerror}") from None
        weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"bundle file '{path}' is not a file")
        self.size, self._modified = status.st_size, status.st_mtime_ns

    @property
    def descriptor_path(self) -> str:
        """A path to this open file in this process, whatever file `path` leads to."""
        return f"/dev/fd/{self.descriptor}"

    @property
    def identity(self) -> str:
        """Device, inode, size and times of modification and change, which differ for other contents."""
        status = os.fstat(self.descriptor)
        times = status.st_mtime_ns, status.st_ctime_ns
        return " ".join(str(number) for number in (status.st_dev, status.st_ino, status.st_size, *times))

    def read_bytes(self) -> bytes:
        """Returns the whole content.

        Raises:
            BundleError: it was changed since it was opened, or cannot be read.
        """
        with self._unchanged():
            return b"".join(self._chunks(self.size or 1))

    @contextlib.contextmanager
    def mapped(self) -> Iterator[mmap.mmap | bytes]:
        """Yields the content as read-only memory.

        The process dies (SIGBUS) if something truncates the file meanwhile.

        Raises:
            BundleError: it was changed since it was opened, by the end too.
        """
        with self._unchanged():
            # No system maps nothing.
            yield mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_READ) if self.size else b""

    def check(self, expected: FileInfo, verify: bool) -> None:
        """Compares size and, if `verify`, sha256 with the manifest's record.

        Raises:
            BundleError: they differ.
        """
        if self.size < expected.size:
            raise BundleError(f"bundle file '{self.path}' is truncated: {self.size} of {expected.size} bytes; {ADVICE}")
        if self.size > expected.size:
            raise BundleError(f"bundle file '{self.path}' has {self.size} bytes instead of {expected.size}; {ADVICE}")
        if verify and self._sha256() != expected.sha256:
            raise self.corrupt()

    def corrupt(self) -> BundleError:
        """Returns the error of a file that is not the one that the manifest lists."""
        return BundleError(f"bundle file '{self.path}' is corrupt: its sha256 is not the manifest's; {ADVICE}")

    def _sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self._chunks(CHUNK):
            digest.update(chunk)
        return digest.hexdigest()

    def _chunks(self, size: int) -> Iterator[bytes]:
        at = 0
        try:
            while chunk := os.pread(self.descriptor, size, at):  # no shared offset, which threads would move
                yield chunk
                at += len(chunk)
        except OSError as error:
            raise BundleError(f"cannot read bundle file '{self.path}': {error.strerror}") from None

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        self.check_unchanged()
        yield
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises BundleError if the file was changed since it was opened."""
        status = os.fstat(self.descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._modified):
            raise BundleError(
                f"bundle file '{self.path}' was changed after the bundle was loaded: load it again, and replace "
                "bundles instead of editing them"
            )


@dataclass(frozen=True)
class Bundle:
    """An open bundle with a checked manifest and checked files, holding one descriptor per file.

    Attributes:
        path: where it was opened, for messages: another bundle may be there by now.
        files: the manifest's files by name.
    """

    path: Path
    manifest: Manifest
    files: Mapping[str, BundleFile] = field(compare=False, repr=False)

    @property
    def handed_over(self) -> dict[str, Any]:
        """The library's option `opened`: the manifest's text and the descriptors, which this object holds."""
        return {
            "manifest": self.manifest.to_json(),
            "files": {name: file.descriptor for name, file in self.files.items()},
        }

    def file(self, name: str) -> BundleFile:
        """Returns one of the bundle's files.

        Raises:
            BundleError: the manifest lists no such file.
        """
        if name not in self.files:
            raise BundleError(f"bundle '{self.path}' has no file {name}")
        return self.files[name]

    def text(self, name: str) -> str | None:
        """Returns one of the bundle's small files as text; None: the manifest lists no such file.

        Raises:
            BundleError: it is no UTF-8, larger than MAX_TEXT_BYTES, or not the file that the manifest lists.
        """
        if name not in self.files:
            return None
        file = self.files[name]
        if file.size > MAX_TEXT_BYTES:
            raise BundleError(f"bundle file '{file.path}' has {file.size} bytes, more than {MAX_TEXT_BYTES}")
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.manifest.files[name].sha256:
            raise file.corrupt()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BundleError(f"cannot read '{file.path}': {error}") from None

    def require_weights(self, sha256: str, model: str) -> None:
        """Checks that the bundle was made from weights with this hash.

        Raises:
            BundleError: it was not; the message names both hashes.
        """
        if sha256 != self.manifest.model.weights_sha256:
            raise BundleError(
                f"bundle '{self.path}' was made from other weights than those of {model} "
                f"(sha256 {self.manifest.model.weights_sha256[:12]}, not {sha256[:12]})"
            )


def open_bundle(path: str | os.PathLike[str], verify: bool = True) -> Bundle:
    """Reads the manifest and opens every file it lists, with its size and (`verify`) its sha256 checked.

    All of it comes from one folder, also while an export replaces the bundle: when files are gone because the folder is
    no longer at `path`, the new one is opened. `path` may be a symbolic link; nothing in the folder may.

    Raises:
        BundleError: not a bundle, a manifest this release cannot read, or a file missing, truncated or corrupt, or not
            a regular file.
    """
    folder = Path(path)
    for attempt in range(1, ATTEMPTS + 1):
        with _folder(folder) as descriptor:
            try:
                return _open_files(folder, descriptor, verify)
            except BundleError:
                if attempt == ATTEMPTS or not _was_replaced(folder, descriptor):
                    raise
    raise AssertionError("unreachable")


def check_is_bundle(path: str | os.PathLike[str]) -> None:
    """Raises BundleError unless `path` is a folder with a manifest, of which nothing is read."""
    with _folder(Path(path)):
        if not (Path(path) / MANIFEST_FILE).exists():
            raise _no_bundle(Path(path))


# --- files ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the path
        raise BundleError(
            f"bundle '{folder}' does not exist: `tide-export export MODEL -o {folder}` makes one"
        ) from None
    except NotADirectoryError:
        raise _no_bundle(folder) from None
    except OSError as error:
        raise BundleError(f"cannot read bundle '{folder}': {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _no_bundle(folder: Path) -> BundleError:
    if folder.suffix.lower() == ".gguf" or (folder / "config.json").is_file():
        return BundleError(f"'{folder}' is a model, export it first: tide-export export {folder} -o BUNDLE")
    return BundleError(f"'{folder}' is not a bundle: it has no {MANIFEST_FILE}")


def _was_replaced(folder: Path, descriptor: int) -> bool:
    try:
        return not os.path.samestat(folder.stat(), os.fstat(descriptor))
    except OSError:
        return True


def _open_files(folder: Path, descriptor: int, verify: bool) -> Bundle:
    source = folder / MANIFEST_FILE
    try:
        os.stat(MANIFEST_FILE, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        raise _no_bundle(folder) from None
    file = BundleFile(source, descriptor, MANIFEST_FILE)
    check_size(file.size, f"'{source}'")
    manifest = Manifest.from_json(file.read_bytes(), source=f"'{source}'")
    files = {name: BundleFile(folder / name, descriptor, name) for name in manifest.files}
    for name, expected in manifest.files.items():
        files[name].check(expected, verify)
    return Bundle(folder, manifest, files)


def _open(folder: int, name: str) -> int:
    """Opens a file relative to `folder`, without following symbolic links and without blocking on a pipe."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    *parents, last = PurePosixPath(name).parts
    with contextlib.ExitStack() as opened:
        for parent in parents:
            folder = os.open(parent, flags, dir_fd=folder)
            opened.callback(os.close, folder)
        return os.open(last, flags, dir_fd=folder)
