"""What follows is drafted as it followed before, longer where that was right and shorter where it was not."""

import numpy as np
import pytest

from tide_export.runtime.decoding.prompt_lookup import MAX_NGRAM, PromptLookup, next_length


def known(text: list[int], min_match: int = 1, max_tokens: int = 8) -> PromptLookup:
    lookup = PromptLookup(max_tokens, min_match)
    lookup.extend(text)
    return lookup


def test_what_followed_the_longest_and_latest_match_is_guessed() -> None:
    lookup = known([1, 2, 3, 9, 2, 3, 8, 7, 7, 1, 2, 3])
    assert lookup.draft([], 3) == [9, 2, 3]  # after 1 2 3, though 2 3 occurs again later
    assert known([1, 2, 5, 0, 1, 2, 6, 0, 1, 2]).draft([], 2) == [6, 0]  # the latest of equals


def test_a_match_must_be_long_enough() -> None:
    text = [4, 5, 6, 7, 0, 5]
    assert known(text, min_match=1).draft([], 2) == [6, 7]
    assert known(text, min_match=2).draft([], 2) == []
    assert known([1, 2], min_match=1).draft([], 2) == []


def test_drafts_belong_to_the_text_that_is_looked_for() -> None:
    lookup = known([1, 2, 3, 4, 5, 0, 1], min_match=2)
    assert lookup.draft([], 3) == []  # 0 1 is new
    assert lookup.draft([2], 3) == [3, 4, 5]
    assert lookup.draft([2, 3], 9) == [4, 5, 0, 1, 2, 3, 4, 5]  # and the end goes on as it does from there


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert known([1, 2, 3, 1, 2, 3, 1]).draft([], 7) == [2, 3, 1, 2, 3, 1, 2]
    assert known([5, 5, 5]).draft([], 4) == [5, 5, 5, 5]


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_through_the_text_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 40).tolist()
    lookup = known(text, min_match=2)
    expected: list[int] = []
    for n in range(MAX_NGRAM, 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if ends:
            period = text[ends[-1] :]
            expected = [period[i % len(period)] for i in range(5)]
            break
    assert lookup.draft([], 5) == expected


def test_length_follows_success() -> None:
    assert next_length(8, 8, 8, 8) == 8
    assert next_length(8, 8, 8, 0) == 1
    assert next_length(1, 8, 1, 1) == 2
    assert next_length(4, 8, 4, 2) == 3
    assert next_length(3, 8, 3, 3) == 6
    lookup = known([1, 1, 1, 1])
    assert len(lookup.draft([], 20)) == 8
    lookup.update(8, 0)
    assert lookup.draft([], 20) == [1]
    lookup.update(1, 1)
    assert lookup.draft([], 20) == [1, 1]
    lookup.update(2, 2)
    assert lookup.draft([], 20) == [1] * 4


def test_restored_it_drafts_as_before() -> None:
    lookup = known([1, 2, 3, 1, 2], min_match=2, max_tokens=4)
    saved = lookup.save()
    for _ in range(2):
        lookup.extend([9, 1, 2, 7, 1, 2])
        lookup.update(4, 1)
        assert lookup.draft([], 9) == [7, 1]
        lookup.restore(saved)
        assert lookup.draft([], 9) == [3, 1, 2, 3]
    lookup.extend([3, 1])
    assert lookup.draft([], 3) == [2, 3, 1]


def test_nothing_is_guessed_where_nothing_may_be() -> None:
    assert known([1, 1, 1]).draft([], 0) == []
    assert known([1, 1, 1], max_tokens=0).draft([], 5) == []
