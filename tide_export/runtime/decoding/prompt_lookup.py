"""Prompt-lookup drafts: the tokens that followed an earlier occurrence of the last few tokens.

Used by `LosslessDecoder` beside the drafts of early exits. Code, tables and answers about a document repeat themselves;
such a draft costs no step, and the run that verifies it takes little longer than a step over one token. Known as prompt
lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and n-gram speculation (vLLM).
"""

from collections.abc import Sequence

MAX_NGRAM = 4  # tokens that are searched for first


class PromptLookup:
    """The text of one sequence, indexed by its n-grams."""

    def __init__(self, max_tokens: int, min_match: int) -> None:
        """An empty text.

        Args:
            max_tokens: of one draft; 0 never drafts.
            min_match: tokens that must have occurred before, 1 to `MAX_NGRAM`.
        """
        self._max_tokens = self._length = max_tokens
        self._matches = range(MAX_NGRAM, min_match - 1, -1)
        self._text: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence

    def extend(self, ids: Sequence[int]) -> None:
        """Adds tokens that are certain."""
        if not self._max_tokens:
            return
        text, follows = self._text, self._follows
        for token in ids:
            end = len(text)
            for n in self._matches:
                if n <= end:
                    follows[tuple(text[end - n :])] = end
            text.append(token)

    def save(self) -> tuple[int, int]:
        """The lengths of the text and of the next draft, which `restore` returns to."""
        return len(self._text), self._length

    def restore(self, saved: tuple[int, int]) -> None:
        """Forgets what was added since `saved`; an older occurrence of an n-gram may be the last again."""
        size, self._length = saved
        before = PromptLookup(self._max_tokens, self._matches.stop + 1)
        before.extend(self._text[:size])
        self._follows, self._text = before._follows, before._text

    def draft(self, drafts: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that may follow the text and then `drafts`; empty where no n-gram matches."""
        max_tokens = min(max_tokens, self._length)
        if max_tokens < 1:
            return []
        last = [*self._text[-MAX_NGRAM:], *drafts][-MAX_NGRAM:]
        for n in self._matches:
            position = self._follows.get(tuple(last[-n:]))  # of a shorter text: all of it
            if position is not None:
                found = [*self._text[position : position + max_tokens], *drafts][:max_tokens]
                while len(found) < max_tokens:  # the end of the text: it goes on repeating itself
                    found += found[: max_tokens - len(found)]
                return found
        return []

    def update(self, drafted: int, accepted: int) -> None:
        """Adapts the length of the next draft to how many tokens of the last one were accepted."""
        self._length = next_length(self._length, self._max_tokens, drafted, accepted)


def next_length(length: int, max_tokens: int, drafted: int, accepted: int) -> int:
    """The length of the draft after one of `drafted` tokens, the first `accepted` of which were right: doubled where
    all were, else shorter."""
    return min(max_tokens, 2 * length if accepted == drafted else accepted + 1)
