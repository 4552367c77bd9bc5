"""What drafts gain and cost follows what verification shows in one sequence."""

import pytest

from tide_export.runtime.decoding.acceptance import (
    ALLOWANCE,
    MAX_BALANCE,
    NGRAM_SHARES,
    START_BALANCE,
    Acceptance,
    Balance,
    ngram_source,
)


def test_estimates_start_at_measured_shares() -> None:
    acceptance = Acceptance()
    for length, shares in enumerate(NGRAM_SHARES, 1):
        for agreements, share in enumerate(shares):
            assert acceptance.of(ngram_source(length, agreements)) == pytest.approx(share)
    assert ngram_source(2, 9) == ngram_source(2, 2)


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


def test_restored_it_estimates_as_before() -> None:
    acceptance, source = Acceptance(), ngram_source(3, 1)
    acceptance.record([source], 1)
    saved, share = acceptance.save(), acceptance.of(source)
    for _ in range(2):
        acceptance.record([source], 0)
        assert acceptance.of(source) != share
        acceptance.restore(saved)
        assert acceptance.of(source) == share


def test_a_balance_grows_by_what_drafts_gain_and_with_the_sequence() -> None:
    balance = Balance()
    balance.settle(accepted=2, cost=1.25, tokens=3)
    assert balance.steps == pytest.approx(START_BALANCE + 0.75 + 3 * ALLOWANCE)
    balance.settle(accepted=0, cost=2.0, tokens=1)
    assert balance.steps < 0
    balance.settle(accepted=100, cost=0.0, tokens=101)
    assert balance.steps == MAX_BALANCE
