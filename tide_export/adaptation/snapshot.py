"""Saves snapshots of a training run so that it can resume after an interruption.

A snapshot is one file, written under a temporary name and renamed: a killed process leaves the last complete one.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tide_export.common.files import TEMPORARY, failure, fsync, lock
from tide_export.errors import AdaptError, TideError, first_line

SNAPSHOT_FILE = "training.pt"


@dataclass(frozen=True)
class Snapshot:
    """The snapshot of a training run in `folder`.

    Attributes:
        settings: must equal those in the snapshot for a run to resume from it.
        error: what a failure raises.
    """

    folder: Path
    settings: dict[str, Any]
    error: type[TideError] = AdaptError

    @property
    def file(self) -> Path:
        return self.folder / SNAPSHOT_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from the folder, which is removed if it is empty at the end.

        Raises:
            error: another run uses it, or it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise self.error(f"cannot use {self.folder}: {failure(error, self.folder)}") from error
        try:
            lock(held, str(self.folder), self.error)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
        finally:
            os.close(held)

    def save(self, snapshot: dict[str, Any]) -> None:
        """Replaces the snapshot.

        Raises:
            error: the file cannot be written; the previous one is kept.
        """
        temporary = self.folder / f"{SNAPSHOT_FILE}.{TEMPORARY}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({"settings": self.settings, **snapshot}, temporary)
            fsync(temporary)
            temporary.replace(self.file)
            fsync(self.folder)
        except (OSError, RuntimeError) as error:  # PyTorch's writer raises RuntimeError on a full disk
            temporary.unlink(missing_ok=True)
            raise self.error(f"cannot save the training to {self.file}: {failure(error, self.folder)}") from error

    def load(self) -> dict[str, Any] | None:
        """Returns the snapshot, or None if there is none.

        Raises:
            error: the file cannot be read, or other settings wrote it.
        """
        if not self.file.exists():
            return None
        try:
            snapshot = torch.load(self.file, map_location="cpu", weights_only=True)
            written = snapshot["settings"]
        except Exception as error:  # zipfile, pickle and PyTorch raise many types
            raise self.error(f"{self.file} is damaged ({first_line(error)}): delete it to begin anew") from error
        require_same(str(self.file), written, self.settings, self.error)
        return snapshot

    def remove(self) -> None:
        """Removes the snapshot."""
        self.file.unlink(missing_ok=True)


def require_same(what: str, written: dict[str, Any], settings: dict[str, Any], error: type[TideError]) -> None:
    """Raises `error` if `what`, of a training with `written`, cannot continue one with `settings`."""
    for name, value in settings.items():
        if written.get(name) != value:
            raise error(
                f"{what} is of a training with {name} {written.get(name)!r}, not {value!r}: give the same settings to "
                "continue it, or delete it to begin anew"
            )
