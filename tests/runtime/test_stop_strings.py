"""Stop strings in text that arrives in pieces: the same whatever the pieces are."""

import random
from itertools import pairwise

import pytest

from tide_export.runtime.stop_strings import StopStrings


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None]:
    found, out = StopStrings(stops), ""
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        out += found.push(text[start:end])
    return out + ("" if found.found else found.finish()), found.found


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], ("one ", "two")),
        ("one two three", [], ("one two three", None)),
        ("one tw", ["two"], ("one tw", None)),
        ("aaab", ["aab"], ("a", "aab")),
        ("x\n\ny", ["\n\n", "y"], ("x", "\n\n")),
        ("abcd", ["cd", "bcd"], ("a", "bcd")),
        ("stop", ["stop"], ("", "stop")),
        ("naïve - 日本", ["日"], ("naïve - ", "日")),
    ],
)
def test_the_first_that_is_complete_ends_the_text(text: str, stops: list[str], expected: tuple) -> None:
    for cuts in ([], list(range(len(text))), [1, 3]):
        assert run(text, stops, cuts) == expected


def test_pieces_do_not_matter() -> None:
    order = random.Random(0)
    for _ in range(300):
        text = "".join(order.choice("ab") for _ in range(12))
        stops = ["".join(order.choice("ab") for _ in range(order.randint(1, 4))) for _ in range(2)]
        one_by_one = run(text, stops, list(range(len(text))))
        assert run(text, stops, order.sample(range(12), 4)) == one_by_one


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    found = StopStrings(["###"])
    assert found.push("ab#") == "ab"
    assert found.push("c") == "#c"
    assert found.push("##") == ""
    assert found.finish() == "##"
