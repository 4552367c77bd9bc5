"""tools/benchmarks/probe_check.py compares a prediction with what a bundle does."""

import sys
from pathlib import Path

import pytest

from tide_export.probing.forecast import Forecast, Prediction

BENCHMARKS = Path(__file__).parents[2] / "tools" / "benchmarks"


@pytest.fixture
def probe_check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield pytest.importorskip("probe_check")
    sys.modules.pop("probe_check", None)


def test_a_bundle_is_measured_in_the_modes_it_has(probe_check, demo_bundle, monkeypatch):
    monkeypatch.setattr(probe_check, "NEW_TOKENS", 8)
    one = Prediction(1.0, 0.9, 1.1)
    forecast = Forecast("fp32", one, None, one, one, (0.1,) * 5, 1, 1)
    rows = probe_check.measured(demo_bundle, forecast, [[5, 6, 7], [8, 9]])
    assert [name for name, _, _ in rows] == ["full, tokens/s", "lossless, exits"]  # auto exits nowhere, no drafter
    assert all(value > 0 for _, _, value in rows)


@pytest.mark.parametrize(("now", "missed"), [(1.05, False), (1.25, False), (1.35, True), (0.85, True)])
def test_a_value_in_the_range_or_near_the_expected_one_is_right(probe_check, now, missed):
    assert probe_check.missed(Prediction(1.0, 1.0, 1.3), now) is missed
