"""The text of one generation as its tokens come, which a stop string may end."""

from collections.abc import Sequence
from typing import Any

from tide_export.runtime.stop_strings import StopStrings
from tide_export.runtime.tokenizer import BundleTokenizer, TextStream


class GeneratedText:
    """Converts tokens to text, up to a stop string.

    Attributes:
        text: so far, without what may yet become a stop string or the rest of a character.
    """

    def __init__(self, tokenizer: BundleTokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        """Nothing came after `prompt` yet."""
        self._stream, self._stops, self.text = TextStream(tokenizer, prompt), StopStrings(stops), ""

    def push(self, token: int) -> bool:
        """Adds a token; whether it completed a stop string."""
        self.text += self._stops.push(self._stream.push(token))
        return self._stops.found is not None

    def finish(self) -> None:
        """Adds what was held back, once the tokens have ended."""
        self.text += self._stops.push(self._stream.finish())
        self.text += self._stops.finish()

    def save(self) -> Any:
        """What `restore` returns to."""
        return self.text, self._stream.save(), self._stops.save()

    def restore(self, saved: Any) -> None:
        """Undoes all since `saved`."""
        self.text, stream, stops = saved
        self._stream.restore(stream)
        self._stops.restore(stops)
