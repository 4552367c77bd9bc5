"""`tools/checks/prose.py`: what it refuses, and what it lets pass."""

import pytest


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lowercase.", "capital letter"),
        ("No period", "period"),
        ("Reads a file. Raises OSError.", "two sentences"),
        ("The same for int64.", "riddle"),
        (f"Reads {'x' * 100}.", "has 107 characters"),
    ],
)
def test_openings_are_refused(line: str, says: str) -> None:
    import prose

    assert says in str(prose.opening(line))


def test_plain_text_passes_and_home_made_words_are_refused() -> None:
    import prose

    assert prose.opening("`tide-export adapt`: trains a model (e.g. Llama) for early exit.") is None
    assert prose.words("A drafted token is accepted.") == []
    found = prose.words("Cases run in\nturns, max most_together; a draft looked up. A state stands still. Left away.")
    assert len(found) == 5
