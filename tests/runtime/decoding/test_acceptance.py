"""Estimates of acceptance follow what verification shows in one sequence."""

import pytest

from tide_export.runtime.decoding.acceptance import EXITS, NGRAM_SHARES, Acceptance, ngram_source


def test_estimates_start_at_measured_shares() -> None:
    acceptance = Acceptance()
    for length, shares in enumerate(NGRAM_SHARES, 1):
        for agreements, share in enumerate(shares):
            assert acceptance.of(ngram_source(length, agreements)) == pytest.approx(share)
    assert ngram_source(2, 9) == ngram_source(2, 2)
    assert acceptance.exits_pay


def test_each_source_is_estimated_separately() -> None:
    acceptance, before = Acceptance(), Acceptance()
    one, two, three = ngram_source(1, 0), ngram_source(2, 0), ngram_source(3, 0)
    acceptance.record([two, one, three], 1)  # the second was rejected: the third shows nothing
    assert acceptance.of(two) > before.of(two)
    assert acceptance.of(one) < before.of(one)
    assert acceptance.of(three) == before.of(three)


def test_later_drafts_count_more() -> None:
    acceptance, source = Acceptance(), ngram_source(1, 0)
    for accepted in (0, 1):
        for _ in range(200):
            acceptance.record([source], accepted)
        assert abs(acceptance.of(source) - accepted) < 0.01


def test_early_exits_that_are_rejected_are_given_up() -> None:
    acceptance, rejected = Acceptance(), 0
    while acceptance.exits_pay:
        acceptance.record([EXITS], 0)
        rejected += 1
    assert rejected == 2
    for _ in range(3):
        acceptance.record([EXITS], 1)
    acceptance.record([EXITS], 0)
    assert acceptance.exits_pay


def test_restored_it_estimates_as_before() -> None:
    acceptance = Acceptance()
    acceptance.record([EXITS], 1)
    saved, share = acceptance.save(), acceptance.of(EXITS)
    for _ in range(2):
        acceptance.record([EXITS], 0)
        assert acceptance.of(EXITS) != share
        acceptance.restore(saved)
        assert acceptance.of(EXITS) == share
