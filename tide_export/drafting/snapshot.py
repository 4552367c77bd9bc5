"""Saves snapshots of a drafter's training beside its answers, by `adaptation.snapshot`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_export.adaptation.snapshot import Snapshot as SnapshotFile
from tide_export.errors import AdaptError, DraftError


class Snapshot:
    """The snapshot in a cache whose settings `store.check_settings` has compared."""

    def __init__(self, folder: Path) -> None:
        self._snapshot = SnapshotFile(folder, {})

    def save(self, snapshot: dict[str, Any]) -> None:
        """Replaces the snapshot.

        Raises:
            DraftError: the file cannot be written; the previous one is kept.
        """
        with _as_draft_error():
            self._snapshot.save(snapshot)

    def load(self) -> dict[str, Any] | None:
        """Returns the snapshot, or None if there is none.

        Raises:
            DraftError: the file cannot be read.
        """
        with _as_draft_error():
            return self._snapshot.load()


@contextmanager
def _as_draft_error() -> Iterator[None]:
    try:
        yield
    except AdaptError as error:
        raise DraftError(str(error)) from error
