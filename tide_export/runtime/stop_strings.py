"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Holds back what may become a stop string, and ends at the first that comes.

    Attributes:
        found: the stop string that ended the text; None while none did.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none is empty."""
        self._stops, self._held = tuple(stops), ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Adds a piece; returns the text that is certain to come before any stop string. Nothing after one was found.

        Of stop strings that end with the same character the longest counts: it begins first.
        """
        if self.found is not None:
            return ""
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            place, self.found = min(places, key=lambda one: (one[0] + len(one[1]), one[0]))
            certain, self._held = self._held[:place], ""
            return certain
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def finish(self) -> str:
        """What was held back, once the text has ended."""
        held, self._held = self._held, ""
        return held

    def save(self) -> Any:
        """What `restore` returns to."""
        return self._held, self.found

    def restore(self, saved: Any) -> None:
        """Undoes all since `saved`."""
        self._held, self.found = saved


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
