"""Keeps the state of a drafter's training beside its answers; see `adaptation.checkpoint` for how."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_export.adaptation import checkpoint
from tide_export.errors import AdaptError, DraftError


class Checkpoint:
    """The state in a cache, whose settings were compared already."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = checkpoint.Checkpoint(folder, {})

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state. Raises DraftError: it cannot be written; the one before is kept."""
        with _as_draft_error():
            self._checkpoint.save(state)

    def load(self) -> dict[str, Any] | None:
        """Returns the state; None where there is none. Raises DraftError: it cannot be read."""
        with _as_draft_error():
            return self._checkpoint.load()


@contextmanager
def _as_draft_error() -> Iterator[None]:
    try:
        yield
    except AdaptError as error:
        raise DraftError(str(error)) from error
