"""Drafts from the text itself: what followed when its last few tokens stood there before.

Used by `LosslessDecoder` beside the drafts of early exits. Code, tables and answers about a document repeat themselves;
what followed last time is a guess that costs no step at all, and the run that verifies it takes little longer than a
step over one token. Known as prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and
n-gram speculation (vLLM).
"""

from collections.abc import Sequence

LONGEST = 4  # tokens that are looked for at first; further back does not tell more


class PromptLookup:
    """The text of one sequence, indexed by its n-grams."""

    def __init__(self, most: int, min_match: int) -> None:
        """An empty text.

        Args:
            most: tokens of one guess; 0 never guesses.
            min_match: tokens that must have stood there before, 1 to `LONGEST`.
        """
        self._most = self._length = most
        self._matches = range(LONGEST, min_match - 1, -1)
        self._text: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> where the token behind its last occurrence stands

    def extend(self, ids: Sequence[int]) -> None:
        """Adds tokens that are certain."""
        if not self._most:
            return
        text, follows = self._text, self._follows
        for token in ids:
            end = len(text)
            for n in self._matches:
                if n <= end:
                    follows[tuple(text[end - n :])] = end
            text.append(token)

    def guess(self, drafts: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow the text and `drafts` behind it; empty where nothing is known."""
        most = min(most, self._length)
        if most < 1:
            return []
        tail = [*self._text[-LONGEST:], *drafts][-LONGEST:]
        for n in self._matches:
            place = self._follows.get(tuple(tail[-n:])) if n <= len(tail) else None
            if place is not None:
                known = [*self._text[place : place + most], *drafts][:most]
                while len(known) < most:  # the end is reached: a text that repeats itself goes on doing so
                    known += known[: most - len(known)]
                return known
        return []

    def learn(self, guessed: int, stood: int) -> None:
        """Of the last guess, of `guessed` tokens, the first `stood` were right: the next is longer, or shorter."""
        self._length = next_length(self._length, self._most, guessed, stood)


def next_length(length: int, most: int, guessed: int, stood: int) -> int:
    """How long the guess after one of `guessed` tokens may be, of which `stood` were right: what fails costs less."""
    return min(most, 2 * length if stood == guessed else stood + 1)
