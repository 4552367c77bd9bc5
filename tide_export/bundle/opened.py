"""Opens a bundle with every file checked.

`runtime.engine.load` calls `open_bundle`, which checks every file against the size and sha256 in `tide.json` before an
engine reads it. Needs only the standard library.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tide_export.bundle.manifest import FileInfo, Manifest
from tide_export.errors import BundleError
from tide_export.names import MANIFEST_FILE


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose manifest was read and whose files were checked."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Returns the path of one of the bundle's files.

        Raises:
            BundleError: the manifest lists no such file.
        """
        if name not in self.manifest.files:
            raise BundleError(f"bundle '{self.path}' has no file {name}")
        return self.path / name

    def require_weights(self, sha256: str, model: str) -> None:
        """Refuses a model whose weights have another hash than those the bundle was made from.

        Raises:
            BundleError: naming both hashes.
        """
        if sha256 != self.manifest.model.weights_sha256:
            raise BundleError(
                f"bundle '{self.path}' was made from other weights than those of {model} "
                f"(sha256 {self.manifest.model.weights_sha256[:12]}, not {sha256[:12]})"
            )


def open_bundle(path: str | os.PathLike[str], verify: bool = True) -> Bundle:
    """Reads the manifest and checks that every file it lists is there, with its size and (`verify`) its sha256.

    Raises:
        BundleError: not a bundle, a manifest this release cannot read, or a file missing, truncated or corrupt.
    """
    folder = Path(path)
    if not folder.exists():
        raise BundleError(f"bundle '{folder}' does not exist")
    if not (folder / MANIFEST_FILE).is_file():
        raise BundleError(f"'{folder}' is not a bundle: it has no {MANIFEST_FILE}")
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read '{folder / MANIFEST_FILE}': {error}") from None
    manifest = Manifest.from_json(text, source=f"'{folder / MANIFEST_FILE}'")
    for name, expected in manifest.files.items():
        _check_file(folder / name, expected, verify)
    return Bundle(folder, manifest)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_file(file: Path, expected: FileInfo, verify: bool) -> None:
    advice = "export the bundle again or copy it anew"
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise BundleError(f"bundle file '{file}' is not a file")
        if size < expected.size:
            raise BundleError(f"bundle file '{file}' is truncated: {size} of {expected.size} bytes; {advice}")
        if size > expected.size:
            raise BundleError(f"bundle file '{file}' has {size} bytes instead of {expected.size}; {advice}")
        if verify and sha256(file) != expected.sha256:
            raise BundleError(f"bundle file '{file}' is corrupt: its sha256 is not the manifest's; {advice}")
    except FileNotFoundError:
        raise BundleError(f"bundle file '{file}' is missing; {advice}") from None
    except OSError as error:
        raise BundleError(f"cannot read bundle file '{file}': {error.strerror}") from None
