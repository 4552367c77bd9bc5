"""What a user says about exits, as the one float per checkpoint that the graph reads."""

import pytest

from tide_export.errors import GenerationError
from tide_export.thresholds.resolve import NEVER_EXIT, check_mode, resolve_thresholds

POINTS = [4, 8, 12]


def test_one_value_serves_every_checkpoint() -> None:
    assert resolve_thresholds(POINTS, 0.85) == [0.85, 0.85, 0.85]
    assert resolve_thresholds(POINTS, 1) == [NEVER_EXIT] * 3  # above which no score is
    assert all(isinstance(value, float) for value in resolve_thresholds(POINTS, 0))


def test_one_value_per_checkpoint() -> None:
    assert resolve_thresholds(POINTS, (0.0, 0.5, 1.0)) == [0.0, 0.5, NEVER_EXIT]


def test_min_layers_is_a_count_of_layers() -> None:
    assert resolve_thresholds(POINTS, 0.5, min_layers=4) == [0.5, 0.5, 0.5]
    assert resolve_thresholds(POINTS, 0.5, min_layers=5) == [NEVER_EXIT, 0.5, 0.5]
    assert resolve_thresholds(POINTS, 0.5, min_layers=8) == [NEVER_EXIT, 0.5, 0.5]
    assert resolve_thresholds(POINTS, 0.5, min_layers=13) == [NEVER_EXIT, NEVER_EXIT, NEVER_EXIT]


def test_off_is_above_every_score() -> None:
    assert NEVER_EXIT > 1.0


def test_a_model_without_checkpoints_has_no_thresholds() -> None:
    assert resolve_thresholds([], 0.5) == []
    assert resolve_thresholds([], []) == []


@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), float("inf"), [0.5, 0.5, 2.0], [0.5, "0.5", 0.5]])
def test_values_outside_zero_to_one_are_refused(value: object) -> None:
    with pytest.raises(GenerationError, match=r"threshold must lie in \[0, 1\]"):
        resolve_thresholds(POINTS, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 4])
def test_a_wrong_number_of_values_names_the_checkpoints(values: list[float]) -> None:
    with pytest.raises(GenerationError, match=r"has \d values but the model has 3 checkpoints \(4, 8, 12\)"):
        resolve_thresholds(POINTS, values)


@pytest.mark.parametrize("layers", [-1, 1.5, True, "8"])
def test_min_layers_out_of_range_is_refused(layers: object) -> None:
    with pytest.raises(GenerationError, match="min_layers"):
        resolve_thresholds(POINTS, 0.5, min_layers=layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["draft", "", "Full"])
def test_unknown_modes_are_refused(mode: str) -> None:
    with pytest.raises(GenerationError, match="mode must be"):
        check_mode(mode)
