"""Writes bundles atomically: a crash never leaves half of one.

`pipeline.flow` writes inside `writing_bundle`: files go into a hidden sibling folder that is renamed into place at the
end, under a lock. `tuning` replaces only the manifest, with `replace_manifest`. Needs only the standard library.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.manifest import FileInfo, Manifest
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.common.files import TEMPORARY, failure, fsync, is_no_space, replace_files
from tide_export.errors import BundleError


@contextlib.contextmanager
def writing_bundle(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling folder to write a bundle into; a clean exit renames it to `path`.

    The body writes its files and finally calls `write_manifest`. On an exception the temporary folder is removed and
    `path` is unchanged. A killed process leaves hidden siblings, which the next export to the same path removes.

    Args:
        path: the bundle's folder; missing parent folders are created.
        overwrite: replace an existing bundle at `path`; anything else there is never replaced.

    Raises:
        BundleError: `path` exists, another export to it is running, the folder cannot be made, or no space is left.
    """
    target = _resolve(path)
    _refuse_existing(target, overwrite)
    temporary = target.parent / f".{target.name}.{TEMPORARY}"
    parked = target.parent / f".{target.name}.tide-old"
    made_parents: list[Path] = []
    done = False
    try:
        try:
            made_parents = _make_parents(target.parent)
        except OSError as error:
            raise BundleError(f"cannot make folder '{target.parent}': {failure(error, target.parent)}") from None
        with _lock(target):
            _clean_up_after_killed_export(target, temporary, parked)
            _refuse_existing(target, overwrite)  # again: another export may have finished before the lock was free
            try:
                temporary.mkdir()
            except OSError as error:
                raise BundleError(f"cannot make folder '{temporary}': {failure(error, target.parent)}") from None
            try:
                yield temporary
                if not (temporary / MANIFEST_FILE).is_file():
                    raise BundleError(f"bundle '{target}' was not written: the export made no {MANIFEST_FILE}")
                _refuse_existing(target, overwrite)  # a long export: the user may have put something there
                _put_in_place(temporary, target, parked)
                done = True
            except Exception as error:
                if is_no_space(error, target.parent):
                    raise BundleError(
                        f"no space left on the disk for bundle '{target}': nothing was written"
                    ) from error
                raise
            finally:
                # After an exchange this is the old bundle; after a failure, the half-written new one.
                shutil.rmtree(temporary, ignore_errors=True)
    finally:
        if not done:
            for parent in reversed(made_parents):
                with contextlib.suppress(OSError):
                    parent.rmdir()


def write_manifest(folder: Path, manifest: Manifest, hashed: Mapping[str, FileInfo] | None = None) -> Manifest:
    """Writes `tide.json` with size and hash of every file in `folder`, and flushes all files to disk.

    Args:
        folder: the bundle's folder.
        manifest: the manifest, whose `files` are replaced.
        hashed: files by name that need not be hashed again.

    Returns:
        The manifest as it will be read back, `files` filled.

    Raises:
        BundleError: the manifest is one that `Manifest.from_json` would refuse.
    """
    files = {}
    for file in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        name = file.relative_to(folder).as_posix()
        if name != MANIFEST_FILE:
            files[name] = (hashed or {}).get(name) or FileInfo(file.stat().st_size, _sha256(file))
            fsync(file)
    text = replace(manifest, files=files).to_json()
    written = Manifest.from_json(text)
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    fsync(folder / MANIFEST_FILE)
    for name in files:  # some libraries make files private; all of a bundle's have one mode, by the umask
        (folder / name).chmod((folder / MANIFEST_FILE).stat().st_mode)
    for subfolder in [folder, *(entry for entry in folder.rglob("*") if entry.is_dir())]:
        fsync(subfolder)
    return written


def replace_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Replaces a bundle's `tide.json` in one step; the files it lists and their hashes stay the same.

    Readers see the old manifest or the new one; after a failure, the old one.

    Args:
        bundle: an open bundle, which must not have been exported or tuned again since.
        manifest: its `files` are replaced by the bundle's.

    Raises:
        BundleError: the bundle has changed since it was opened, an export to it is running, it cannot be written to,
            or the manifest is one that `Manifest.from_json` would refuse.
    """
    return _write_over(bundle, replace(manifest, files=bundle.manifest.files))


def _write_over(bundle: Bundle, manifest: Manifest) -> Bundle:
    folder = bundle.path.resolve()
    file = folder / MANIFEST_FILE
    text = manifest.to_json()
    written = Manifest.from_json(text, source=f"the new '{file}'")
    with _lock(folder):
        if open_bundle(folder, verify=False).manifest != bundle.manifest:
            raise BundleError(f"bundle '{bundle.path}' was changed by something else meanwhile: it is left as it is")
        try:
            replace_files({file: text.encode()})
        except OSError as error:
            raise BundleError(f"cannot write '{file}', which stays as it was: {failure(error, folder)}") from error
    return replace(bundle, manifest=written)


def put_files(
    bundle: Bundle, sources: Mapping[str, Path], manifest: Manifest, without: Manifest, removed: Sequence[str] = ()
) -> Bundle:
    """Moves files into a bundle, removes others, and replaces the manifest.

    A process that is killed meanwhile leaves a bundle without these files, with the manifest `without`.

    Args:
        sources: the new files by their names in the bundle; on the same disk.
        manifest, without: the manifest with and without those files; `files` are filled from the bundle's.
        removed: names of files to remove.

    Raises:
        BundleError: as `replace_manifest`.
    """
    infos = {name: FileInfo(source.stat().st_size, _sha256(source)) for name, source in sources.items()}
    for source in sources.values():
        fsync(source)
    gone = {*sources, *removed}
    others = {other: of for other, of in bundle.manifest.files.items() if other not in gone}
    if gone & bundle.manifest.files.keys():
        bundle = _write_over(bundle, replace(without, files=others))
    try:
        for name, source in sources.items():
            source.replace(bundle.path / name)
        for name in removed:
            (bundle.path / name).unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"cannot write '{error.filename}': {failure(error, bundle.path)}") from error
    return _write_over(bundle, replace(manifest, files=others | infos))


# --- files ---------------------------------------------------------------------------------------------------------


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- the output folder and its lock -----------------------------------------------------------------------------------


def _resolve(path: str | os.PathLike[str]) -> Path:
    try:
        target = Path(path).resolve()
        str(target).encode()  # tokenizers and ONNX Runtime take no other names
    except UnicodeEncodeError:
        raise BundleError(f"output {os.fspath(path)!r} is not a usable path: it is not UTF-8") from None
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a NUL
        raise BundleError(f"output {os.fspath(path)!r} is not a usable path: {error}") from None
    return target


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise BundleError(f"output '{target}' already exists: choose another name, or overwrite it with --overwrite")
    if not (target / MANIFEST_FILE).is_file():
        raise BundleError(f"output '{target}' exists and is not a bundle (no {MANIFEST_FILE}): it is not overwritten")


def _make_parents(folder: Path) -> list[Path]:
    """Creates `folder` and its parents; returns those that were missing, outermost first."""
    missing = [entry for entry in [folder, *folder.parents] if not entry.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Holds the lock of writers to `target`; the kernel releases it when the process dies."""
    import fcntl  # here, as running a bundle must work without flock

    file = target.parent / f".{target.name}.tide-lock"
    while True:
        _require_kind(file, stat.S_ISREG)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise BundleError(f"cannot make '{file}': {failure(error, target.parent)}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BundleError(f"another export to '{target}' is running, or a tuning of it") from None
        except OSError as error:
            os.close(descriptor)
            raise BundleError(f"cannot lock '{file}': {error.strerror}") from None
        # The last holder may have removed the file between our open and our flock: then no other process sees our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), file.lstat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        os.close(descriptor)


def _clean_up_after_killed_export(target: Path, temporary: Path, parked: Path) -> None:
    """Removes the folders of a killed export; the caller holds the lock, so no running export uses them."""
    for folder in (temporary, parked):
        _require_kind(folder, stat.S_ISDIR)
    if parked.exists() and not target.exists():
        parked.rename(target)  # killed between the two renames of `_put_in_place`
    for folder in (temporary, parked):
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise BundleError(f"cannot remove '{folder}', which a killed export left: {error.strerror}") from None


def _require_kind(path: Path, is_kind: Callable[[int], bool]) -> None:
    """Refuses a file at `path` that no export made, such as a link planted there."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # most often there is nothing; what else is wrong shows when it is opened
        return
    if not is_kind(mode):
        raise BundleError(f"'{path}' is in the way of the export, which did not make it: delete or rename it")


def _put_in_place(temporary: Path, target: Path, parked: Path) -> None:
    if not target.exists():
        temporary.rename(target)  # fails if someone makes a folder there at this moment
    elif not _exchange(temporary, target):
        target.rename(parked)
        try:
            temporary.rename(target)
        except BaseException:
            parked.rename(target)
            raise
        shutil.rmtree(parked, ignore_errors=True)
    fsync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step (Linux renameat2); returns False if kernel or file system cannot."""
    at_cwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0
