"""How time is divided, when a training ends, and the speed that is expected."""

import math

import numpy as np
import pytest

from tide_export.drafting import schedule
from tide_export.drafting.schedule import Spent, answer_share, expected_speed, gain_left, next_round, rate

HOUR = 3600.0
ANSWER_RATE, ROW_RATE = 600.0, 2400.0  # a second


def simulated(total: float, enough_at: int | None = None) -> tuple[list[schedule.Round], Spent]:
    spent, rounds = Spent(0.0, 0.0, 0.0, 0, 0), list[schedule.Round]()
    while not rounds or not rounds[-1].last:
        rounds.append(next_round(spent, total, len(rounds) == enough_at))
        plan = rounds[-1]
        assert plan.answer_until >= spent.answering
        assert plan.train_until >= spent.training
        spent = Spent(
            plan.answer_until,
            plan.train_until,
            spent.measuring + 10.0,
            round(plan.answer_until * ANSWER_RATE),
            round(plan.train_until * ROW_RATE),
        )
    return rounds, spent


def test_an_hour_is_filled_with_two_passes() -> None:
    rounds, spent = simulated(HOUR)
    assert 7 <= len(rounds) <= 9
    assert spent.seconds == pytest.approx(HOUR, rel=0.03)
    passes = spent.trained_rows / schedule.TRAINED_STEPS / spent.answer_tokens
    assert passes == pytest.approx(schedule.PASSES, rel=0.25)
    assert rounds[-1].train_until == rounds[-1].train_total  # so that the learning rate falls to its end
    assert rounds[0].answer_until > rounds[-1].answer_until - rounds[-2].answer_until  # answers come early


def test_a_training_that_gains_little_ends_with_a_falling_rate() -> None:
    rounds, spent = simulated(HOUR, enough_at=4)
    assert len(rounds) == 5
    assert spent.seconds < 0.8 * HOUR
    last, before = rounds[-1], rounds[-2]
    assert last.last
    assert last.answer_until == before.answer_until
    assert last.train_until == pytest.approx(before.train_until * (1 + schedule.LAST_SHARE))
    assert rate(1000, before.train_until / last.train_total) > 3 * rate(1000, 1.0)


def test_long_trainings_are_measured_each_twenty_minutes() -> None:
    rounds, spent = simulated(10 * HOUR)
    assert 25 <= len(rounds) <= 33
    assert spent.seconds == pytest.approx(10 * HOUR, rel=0.03)


def test_shares_follow_the_speeds() -> None:
    assert answer_share(Spent(0.0, 0.0, 0.0, 0, 0)) == schedule.FIRST_ANSWER_SHARE
    assert answer_share(Spent(10.0, 10.0, 0.0, 6000, 18000)) == pytest.approx(1 / 3)
    assert answer_share(Spent(10.0, 10.0, 0.0, 10, 10**9)) == schedule.MAX_ANSWER_SHARE


def test_the_rate_warms_up_stays_and_falls() -> None:
    assert rate(0, 0.0) == pytest.approx(1 / schedule.WARM_UP)
    assert rate(100, 0.2) == 1.0
    assert rate(100, 0.625) == pytest.approx(0.5)
    assert rate(100, 1.0) == rate(100, 1.2) == schedule.FINAL_RATE


def test_expected_speed() -> None:
    costs = (0.08, 0.13, 0.24, 0.43, 0.7)
    assert expected_speed((0.0,), costs) == pytest.approx(1 / 1.15)
    assert expected_speed((0.36, 0.34, 0.36, 0.34), costs) == pytest.approx(1.36 / 1.15)
    drafts = np.arange(1, schedule.MAX_DRAFTS + 1)
    tokens = 1 + np.cumsum(0.9**drafts)
    speeds = tokens / (1 + 0.07 * drafts + np.interp(drafts, (1, 2, 4, 8, 16), costs))
    assert expected_speed((0.9, 0.9), costs) == pytest.approx(speeds.max())
    assert speeds.argmax() > 4


def test_what_the_time_left_gains() -> None:
    measured = [(100_000 * 2**n, 1.0 + 0.04 * n) for n in range(4)]
    assert gain_left(measured[:2], 0.5) == math.inf
    assert gain_left(measured, 0.5) == pytest.approx(0.04 / 1.12)
    assert gain_left(measured, 0.99) < schedule.MIN_GAIN
    assert gain_left([(tokens, 1.2) for tokens, _ in measured], 0.3) == pytest.approx(0, abs=1e-9)
