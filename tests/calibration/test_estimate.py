"""The estimate: it counts the tokens that calibration will use, and says how long each part takes before it begins."""

import copy
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tide_export.calibration.config import TideConfig
from tide_export.calibration.estimate import Costs, Work
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
    ran = [n for n, message in enumerate(caplog.messages) if message.startswith("running the model")]
    assert caplog.messages.index(sentence) < min(ran)


@pytest.mark.parametrize("checkpoints", [(3, 9), "auto"])
def test_another_models_tokenizer_is_refused_before_the_model_runs(demo, tokenizer, checkpoints):
    other = copy.deepcopy(tokenizer)
    assert other.add_tokens(["self.assertEqual"]) == 1
    config = TideConfig(checkpoints=checkpoints, calibration_dataset=str(TEXT), calibration_samples=16)
    with pytest.raises(CalibrationError, match=r"gives token id \d+ but .* knows \d+ tokens: it is another model's"):
        calibrate(demo, other, config)
