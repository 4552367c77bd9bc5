"""Prompt-lookup drafts: the tokens that followed an earlier occurrence of the last few tokens.

Used by `LosslessDecoder` beside the drafts of early exits. Code, tables and answers about a document repeat themselves;
such a draft costs no step, and the run that verifies it takes little longer than a step over one token. Known as prompt
lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and n-gram speculation (vLLM).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tide_export.runtime.decoding.acceptance import NGRAM_SHARES, ngram_source

MAX_NGRAM = len(NGRAM_SHARES)  # tokens that are searched for first


class Match(NamedTuple):
    """A token that may follow, and the source of its draft (see `acceptance`)."""

    token: int
    source: int


class PromptLookup:
    """The text of one sequence, indexed by its n-grams."""

    def __init__(self) -> None:
        """An empty text."""
        self._text: list[int] = []
        # n-gram -> position after its last occurrence, times in a row that the same token was there before
        self._follows: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, ids: Sequence[int]) -> None:
        """Adds tokens that are certain."""
        text, follows = self._text, self._follows
        for token in ids:
            end = len(text)
            for n in range(1, min(MAX_NGRAM, end) + 1):
                ngram = tuple(text[end - n :])
                position, agreements = follows.get(ngram, (end, -1))
                same = position == end or text[position] == token
                follows[ngram] = end, agreements + 1 if same else 0
            text.append(token)

    def next(self, drafts: Sequence[int]) -> Match | None:
        """The token that followed the longest n-gram at the end of the text and then `drafts`, where it occurred last;
        None where no token of it occurred before."""
        last = [*self._text[-MAX_NGRAM:], *drafts[-MAX_NGRAM:]][-MAX_NGRAM:]
        for n in range(len(last), 0, -1):
            found = self._follows.get(tuple(last[-n:]))
            if found is not None:
                return Match(self._text[found[0]], ngram_source(n, found[1]))
        return None

    def save(self) -> int:
        """The length of the text, which `restore` returns to."""
        return len(self._text)

    def restore(self, saved: int) -> None:
        """Forgets what was added since `saved`; an older occurrence of an n-gram may be the last again."""
        before = PromptLookup()
        before.extend(self._text[:saved])
        self._follows, self._text = before._follows, before._text
