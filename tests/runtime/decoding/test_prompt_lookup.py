"""What follows is drafted as it followed before."""

import numpy as np
import pytest

from tide_export.runtime.decoding.acceptance import ngram_source
from tide_export.runtime.decoding.prompt_lookup import MAX_NGRAM, PromptLookup


def known(text: list[int]) -> PromptLookup:
    lookup = PromptLookup()
    lookup.extend(text)
    return lookup


def drafted(lookup: PromptLookup, drafts: list[int], count: int) -> list[int]:
    """Up to `count` tokens after the text and `drafts`."""
    tokens = list(drafts)
    while len(tokens) < len(drafts) + count and (match := lookup.next(tokens)):
        tokens.append(match.token)
    return tokens[len(drafts) :]


def test_the_token_after_the_longest_and_latest_match_is_drafted() -> None:
    lookup = known([1, 2, 3, 9, 2, 3, 8, 7, 7, 1, 2, 3])
    assert lookup.next([]) == (9, ngram_source(3, 0))  # after 1 2 3, though 2 3 occurs again later
    assert drafted(lookup, [], 3) == [9, 2, 3]
    assert drafted(known([1, 2, 5, 0, 1, 2, 6, 0, 1, 2]), [], 2) == [6, 0]  # the latest of equals


def test_nothing_is_drafted_after_a_token_that_did_not_occur_before() -> None:
    assert known([1, 2]).next([]) is None
    assert known([1, 2, 1]).next([7]) is None
    assert known([]).next([]) is None


def test_drafts_continue_the_text() -> None:
    lookup = known([1, 2, 3, 4, 5, 0, 1])
    assert drafted(lookup, [2], 3) == [3, 4, 5]
    assert lookup.next([2]) == (3, ngram_source(2, 0))
    assert lookup.next([2, 3, 4, 5]) == (0, ngram_source(3, 0))


def test_a_text_that_repeats_itself_is_expected_to_go_on() -> None:
    assert drafted(known([1, 2, 3, 1, 2, 3, 1]), [], 7) == [2, 3, 1, 2, 3, 1, 2]
    assert drafted(known([5, 5, 5]), [], 4) == [5, 5, 5, 5]


def test_agreements_count_how_often_in_a_row_the_same_token_followed() -> None:
    def source(text: list[int]) -> int:
        match = known([*text, 9]).next([])
        assert match is not None
        return match.source

    assert source([9, 1, 3]) == ngram_source(1, 0)
    assert source([9, 1, 3, 9, 1, 4]) == ngram_source(1, 1)
    assert source([9, 1, 3, 9, 1, 4, 9, 1, 5]) == ngram_source(1, 2)
    assert source([9, 1, 3, 9, 1, 4, 9, 2, 5]) == ngram_source(1, 0)
    assert source([9, 1, 3, 9, 1, 4, 9, 2, 5, 9, 2, 6]) == ngram_source(1, 1)
    assert source([9, 1] * 5) == ngram_source(MAX_NGRAM, 2)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_through_the_text_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 40).tolist()
    expected = None
    for n in range(MAX_NGRAM, 0, -1):
        after = [text[end] for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if after:
            others = [i for i, token in enumerate(reversed(after)) if token != after[-1]]
            expected = after[-1], ngram_source(n, (others[0] if others else len(after)) - 1)
            break
    assert known(text).next([]) == expected


def test_restored_it_drafts_as_before() -> None:
    lookup = known([1, 2, 3, 1, 2])
    saved = lookup.save()
    for _ in range(2):
        lookup.extend([9, 1, 2, 7, 1, 2])
        assert drafted(lookup, [], 2) == [7, 1]
        lookup.restore(saved)
        assert drafted(lookup, [], 4) == [3, 1, 2, 3]
    lookup.extend([3, 1])
    assert drafted(lookup, [], 3) == [2, 3, 1]
