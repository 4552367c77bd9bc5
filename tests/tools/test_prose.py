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


def test_a_quantity_has_one_name_and_the_glossary_defines_it() -> None:
    import prose

    found = prose.words("agreement with full depth, disagreement, layers a token, layer passes per token")
    assert [one.rpartition("says ")[2] for one in found] == ["'changed tokens'"] * 2 + ["'layers per token'"] * 2
    assert prose.words("A speed-up of 1.2x.") == []
    assert len(prose.words("A speed-up of 1.2x.", prose.IN_DOCUMENTS)) == 1
    glossary = (prose.ROOT / "docs" / "reference" / "glossary.md").read_text()
    for name in ("changed tokens", "layers per token", "speed over full depth"):
        assert f"\n- **{name}**: " in glossary
