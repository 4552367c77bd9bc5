"""The estimate: it counts the tokens that calibration will use, and says how long each part takes before it begins."""

import copy
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tide_export.calibration.config import TideConfig
from tide_export.calibration.estimate import MEASURED, Costs, Timetable, Work
from tide_export.calibration.fit_lenses import MEASUREMENTS
from tide_export.calibration.flow import calibrate
from tide_export.calibration.placement import CURVE_TOKENS
from tide_export.calibration.split import Split
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError

TEXT = Path(__file__).parents[2] / "calibration" / "text" / "python-stdlib-validation.jsonl"


def split(train, validation, test):
    """Sequences of a hundred tokens."""

    def part(count):
        return [TokenSequence(number, np.zeros(100, np.int32)) for number in range(count)]

    return Split(part(train), part(validation), part(test), "documents")


def work(demo, **options):
    return Work.of(demo, split(70, 20, 10), (3, 6, 9), TideConfig.from_options(**options))


def test_every_token_is_read_once_where_all_are_kept(demo):
    found = work(demo, lens_tokens=10_000, lens_epochs=2)
    assert found == Work(read=10_000, again=0, lens=10_000, train=7_000, held_out=1_000)
    assert work(demo, lens_epochs=1).lens == 7_000  # a text that has fewer tokens


def test_tokens_that_are_not_kept_are_read_again_for_lenses(demo):
    found = work(demo, lens_tokens=10_000, lens_epochs=2, calibration_tokens_kept=2_000)
    assert found == Work(read=10_000, again=10_000, lens=10_000, train=2_000, held_out=500)
    assert work(demo, exit_strategy="identity", calibration_tokens_kept=2_000).again == 0


def test_large_models_read_less_text_unless_it_was_asked_for():
    assert TideConfig().sized(150_000_000) == TideConfig()
    half = TideConfig().sized(494_000_000)
    assert (half.calibration_samples, half.lens_tokens) == (36, 12_146)
    large = TideConfig().sized(70_000_000_000)
    assert (large.calibration_samples, large.lens_tokens) == (24, 8_000)
    assert TideConfig(calibration_samples=120).sized(494_000_000).calibration_samples == 120
    assert TideConfig(lens_tokens=40_000).sized(494_000_000).lens_tokens == 40_000
    assert TideConfig(self_generated="prompts.txt").sized(494_000_000).calibration_samples == 120


def test_seconds_are_tokens_times_costs():
    done = Work(read=1_000, again=500, lens=2_000, train=700, held_out=100)
    seconds = dict.fromkeys(("model", "head", "target", "lens", "router", "changed"), 0.0)
    model = Costs(**seconds | {"model": 1.0}).of(done, checkpoints=3, depth=12)
    assert list(model.values()) == [1_500 + 4 * CURVE_TOKENS, 0, 0, 0]
    lenses = Costs(**seconds | {"target": 1.0, "lens": 0.1}).of(done, checkpoints=3, depth=12)
    assert list(lenses.values()) == pytest.approx([0, 2_000 * 1.3, 0, 0])
    routers = Costs(**seconds | {"router": 1.0}).of(done, checkpoints=3, depth=12)
    assert list(routers.values()) == [0, 0, 2_100, 0]
    changed = Costs(**seconds | {"changed": 1.0}).of(done, checkpoints=3, depth=12)
    assert list(changed.values()) == [0, 0, 0, 300]


def test_the_measurements_of_lenses_count():
    done = Work(read=1_000, again=0, lens=2_000, train=700, held_out=100)
    nothing = dict.fromkeys(("model", "head", "target", "lens", "router", "changed"), 0.0)
    lenses = list(Costs(**nothing | {"head": 1.0}).of(done, checkpoints=3, depth=12).values())[1]
    assert lenses == MEASURED * 100 * (MEASUREMENTS + 1) * 4
    looked_at = next(iter(Costs(**nothing | {"head": 1.0}).of(done, checkpoints=3, depth=12).values()))
    assert looked_at == MEASURED * CURVE_TOKENS * 12, "the look at every layer, which follows the reading"
    without = Work(read=1_000, again=0, lens=0, train=700, held_out=100)
    assert list(Costs(**nothing | {"head": 1.0}).of(without, checkpoints=3, depth=12).values())[1] == 0


def test_parts_that_are_done_correct_what_is_left(caplog):
    now = iter([100.0, 400.0, 400.0, 1000.0])
    timetable = Timetable({"reading": 100.0, "lenses": 0.0, "routers": 200.0, "measuring": 100.0}, lambda: next(now))
    assert timetable.sentence == (
        "calibration takes about 7 minutes on this machine: reading 2 minutes, routers 3 minutes, measuring 2 minutes"
    )
    with caplog.at_level(logging.INFO, logger="tide_export"):
        for _ in range(4):
            timetable.next()
    assert caplog.messages == [
        "reading: 25 % of the calibration, about 7 minutes left in all",
        "routers: 50 % of the calibration, about 15 minutes left in all",  # three times as slow as estimated
        "measuring: 25 % of the calibration, about 5 minutes left in all",
    ]


def test_costs_are_measured(demo, sequences):
    measured = Costs.measure(demo, Split(sequences[:8], sequences[8:10], sequences[10:], "documents"), TideConfig())
    for cost in vars(measured).values():
        assert math.isfinite(cost)
        assert 0 < cost < 1
    assert measured.head < measured.model  # of demo-llama's twelve layers


def test_it_is_said_before_the_model_runs(demo, tokenizer, caplog):
    options = {"calibration_dataset": str(TEXT), "calibration_samples": 16, "calibration_length": 64}
    config = TideConfig(checkpoints=(3, 9), router_epochs=1, exit_strategy="identity", **options)
    with caplog.at_level(logging.INFO, logger="tide_export"):
        calibrate(demo, tokenizer, config)
    said = [message for message in caplog.messages if message.startswith("calibration takes about ")]
    (sentence,) = said
    assert re.search(r"on this machine: reading 1,024 tokens [0-9]+ seconds?, fitting 2 routers to [0-9]+ ", sentence)
    assert "lens" not in sentence
    shares = [message for message in caplog.messages if "% of the calibration, about " in message]
    assert [message.partition(":")[0] for message in shares] == [
        "reading 1,024 tokens",
        next(part for part in re.findall(r"fitting 2 routers to [0-9,]+", sentence)),
        "measuring",
    ]
    ran = [n for n, message in enumerate(caplog.messages) if message.startswith("running the model")]
    assert caplog.messages.index(sentence) < min(ran)


@pytest.mark.parametrize("checkpoints", [(3, 9), "auto"])
def test_another_models_tokenizer_is_refused_before_the_model_runs(demo, tokenizer, checkpoints):
    other = copy.deepcopy(tokenizer)
    assert other.add_tokens(["self.assertEqual"]) == 1
    config = TideConfig(checkpoints=checkpoints, calibration_dataset=str(TEXT), calibration_samples=16)
    with pytest.raises(CalibrationError, match=r"gives token id \d+ but .* knows \d+ tokens: it is another model's"):
        calibrate(demo, other, config)
