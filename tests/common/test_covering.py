"""Few rows have every feature."""

from covering import covering, pairs

ROWS = {"a": ("1",), "b": ("1", "2"), "c": ("2", "3"), "d": ("1", "2", "3"), "e": (), "f": ("4", "1")}


def test_every_feature_is_had_by_few_rows() -> None:
    assert covering(ROWS) == ["d", "f"]


def test_a_row_is_chosen_for_what_is_missing_then_for_all_that_it_has() -> None:
    assert covering({"a": ("1",), "b": ("1", "2"), "c": ("3",)}) == ["b", "c"]
    assert covering({"a": ("1", "2"), "b": ("3",), "c": ("3", "1")}) == ["a", "c"]


def test_rows_without_features_need_none() -> None:
    assert covering({"a": (), "b": ()}) == []


def test_rows_that_are_taken_anyway_need_no_others() -> None:
    assert covering(ROWS, ["b"]) == ["d", "f"]
    assert covering(ROWS, ["d", "f"]) == []


def test_pairs_are_had_together() -> None:
    rows = {name: pairs(features) for name, features in ROWS.items()}
    assert rows["d"] == [("1", "2"), ("1", "3"), ("2", "3")]
    assert covering(rows, ["b"]) == ["d", "f"]
