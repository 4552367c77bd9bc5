"""The predictions: who gains, from step times that no machine decides."""

import numpy as np
import pytest
from probe_models import EARLY, LAYERS, steps

from tide_export.calibration.config import TideConfig
from tide_export.probing.flow import draft_minutes, planned
from tide_export.probing.forecast import exit_seconds, forecast, pays


def test_a_model_made_for_early_exit_is_foretold_to_gain(of_early):
    answers, early = of_early
    assert early.changed == pytest.approx((0.0,), abs=0.01)  # the state is the last layer's
    found = forecast(steps(), early, answers.prompts, 0.02)
    # Each token runs 4 of 8 layers and the head, and pending tokens catch up at a cost.
    assert 1.3 < found.exit.speed.low <= found.exit.speed.expected <= found.exit.speed.high < 9 / 5
    assert found.exit.changed <= 0.02
    assert found.exit.layers == pytest.approx(EARLY, abs=0.5)
    assert pays(found.lossless)


def test_a_model_of_random_weights_is_foretold_to_gain_nothing(of_random):
    answers, early = of_random
    assert early.changed[0] > 0.2
    found = forecast(steps(), early, answers.prompts, 0.02)
    assert not pays(found.exit.speed)
    assert found.exit.layers > LAYERS - 0.2


def test_exits_that_cost_what_they_save_do_not_pay(of_early):
    answers, early = of_early
    found = forecast(steps(layer=0.001), early, answers.prompts, 0.02)  # all time is the head's
    assert not pays(found.exit.speed)
    assert not pays(forecast(steps(block=1.9), early, answers.prompts, 0.02).drafter)


def test_a_drafter_gains_more_where_verifying_is_cheap(of_random):
    answers, early = of_random
    cheap, dear = (forecast(steps(block=cost), early, answers.prompts, 0.02).drafter for cost in (1.02, 1.3))
    assert cheap.low < cheap.expected < cheap.high
    assert cheap.expected > dear.expected > 1.0
    # One draft, half of which are accepted: 1.5 tokens for a step, its verification and the draft.
    assert dear.expected >= 1.5 / (1 + 0.3 + 0.07)


def test_the_time_of_exits_follows_the_runtimes_rule():
    one = steps(block=1.0)
    assert exit_seconds(one, (4,), [1, 1, 1], 16) == pytest.approx(3 * (1 + 8 + 0.03))
    # Two wait, and the third's deep segment runs over three.
    catching_up = 3 * (1 + 4 + 0.03) + 4 * one.blocks[3]
    assert exit_seconds(one, (4,), [0, 0, 1], 16) == pytest.approx(catching_up)
    # With room for one the second token's exit forces the run over two, and the third waits again.
    assert exit_seconds(one, (4,), [0, 0, 0], 1) == pytest.approx(3 * (1 + 4 + 0.03) + 4 * one.blocks[2])
    # A segment in the middle runs over what waits before it, the last one does not.
    middle = exit_seconds(one, (2, 6), [0, 1], 16)
    assert middle == pytest.approx(2 * (1 + 2) + 3 * 0.03 + 4 * one.blocks[2])


def test_step_costs_are_those_of_the_line():
    costs = steps().costs((2, 4))
    assert costs.plain == 9
    assert costs.draft == pytest.approx((1 + 2.03, 1 + 4.06))
    assert costs.block[2] == pytest.approx(9 * 1.05)
    assert costs.verify[2] == pytest.approx(2 + 7 * 1.05 + 0.06)
    assert costs.verify_costs[0] == pytest.approx(0.05)


def test_checkpoints_are_those_of_a_calibration_or_fewer():
    config = TideConfig()
    assert planned(24, config) == (4, 8, 12, 16, 20)
    assert planned(80, config) == tuple(range(9, 80, 9))
    assert planned(3, config) == (1,)
    assert planned(1, config) == ()


def test_a_recording_has_equally_long_answers(of_early):
    answers, early = of_early
    recorded, chosen = early.recorded()
    rows, positions = recorded.full.shape
    assert rows == len(chosen)
    for number, tokens in zip(chosen, recorded.full, strict=True):
        assert tokens.tolist() == answers.answers[number][:positions]


def test_drafts_take_longer_on_a_slower_machine():
    fast, slow = draft_minutes(steps(layer=0.001, base=0)), draft_minutes(steps(layer=0.002, base=0))
    assert np.divide(slow, fast) == pytest.approx([2, 2])
    assert fast[0] < fast[1]
