"""Saves the state of a drafter's training beside its answers, by `adaptation.checkpoint`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_export.adaptation import checkpoint
from tide_export.errors import AdaptError, DraftError


class Checkpoint:
    """The saved state in a cache whose settings `store.check_settings` has compared."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = checkpoint.Checkpoint(folder, {})

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the saved state.

        Raises:
            DraftError: the file cannot be written; the previous state is kept.
        """
        with _as_draft_error():
            self._checkpoint.save(state)

    def load(self) -> dict[str, Any] | None:
        """Returns the saved state, or None if there is none.

        Raises:
            DraftError: the file cannot be read.
        """
        with _as_draft_error():
            return self._checkpoint.load()


@contextmanager
def _as_draft_error() -> Iterator[None]:
    try:
        yield
    except AdaptError as error:
        raise DraftError(str(error)) from error
