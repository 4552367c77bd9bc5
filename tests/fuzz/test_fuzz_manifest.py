"""Manifests that parsers of JSON take differently; the library reads each that the package reads.

Mutated ones are a target of fuzzing by coverage (targets.py).
"""

from pathlib import Path

import pytest
from manifests import TEXTS
from targets import verdict


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_parsers_take_differently(tmp_path: Path, name: str) -> None:
    text, refused = TEXTS[name]
    sentence = verdict(tmp_path, text)
    assert sentence is None if refused is None else refused in str(sentence)
