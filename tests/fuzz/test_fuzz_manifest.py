"""Mutated manifests are parsed and described, or refused in one sentence: the same in Python and in the library."""

import re
from pathlib import Path
from random import Random

import pytest
from fuzz.settings import cases
from hypothesis import given
from hypothesis import strategies as st
from manifests import TEXTS, manifests
from mutations import mutated_bytes, mutated_json

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.inspect import describe_bundle, render
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.errors import BundleError
from tide_export.runtime.native import created

KINDS = manifests()
MISSING_FILE = r"bundle file '.*' is missing; "  # whichever it looks for first
# Records as `calibrate` and `tune` write them, whose contents only `inspect` and `tune` read.
REPORT = {"1": {"exit_rate": 0.5, "precision": 1.0, "tokens": 3}, "2": {"exit_rate": None}}
RECORDS = KINDS[0] | {
    "calibration": {"dataset": "wikitext", "report": REPORT, "document_hashes": ["ab"]},
    "tuning": {"certified": True, "thresholds": [0.5, 1.0], "min_layers": 2, "path": [{"risk": 0.5, "p_value": None}]},
}


class Parsers:
    """Both parsers, on a bundle that has a manifest alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def verdict(self, text: bytes) -> str | None:
        """The sentence that refuses the manifest, the same of both; None: they accept it, and miss the files."""
        (self._folder / MANIFEST_FILE).write_bytes(text)
        with pytest.raises(BundleError) as python:
            open_bundle(self._folder, verify=False)
        with pytest.raises(BundleError) as library:
            created("load", str(self._folder).encode(), b'{"provider": "cpu"}')
        sentences = [str(error.value) for error in (python, library)]
        if all(re.match(MISSING_FILE, sentence) for sentence in sentences):
            return None
        assert sentences[0] == sentences[1]
        assert "\n" not in sentences[0]
        return sentences[0]


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> Parsers:
    return Parsers(tmp_path_factory.mktemp("manifests"))


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_parsers_take_differently(parsers: Parsers, name: str) -> None:
    text, refused = TEXTS[name]
    sentence = parsers.verdict(text)
    assert sentence is None if refused is None else refused in str(sentence)


@cases(400, 3000)
@given(random=st.randoms(use_true_random=False))
def test_mutated_fields(parsers: Parsers, random: Random) -> None:
    parsers.verdict(mutated_json(random, random.choice(KINDS)).encode())


@cases(150, 1000)
@given(random=st.randoms(use_true_random=False))
def test_mutated_bytes(parsers: Parsers, random: Random) -> None:
    parsers.verdict(mutated_bytes(random, mutated_json(random, random.choice(KINDS), times=1).encode()))


@cases(150, 1000)
@given(random=st.randoms(use_true_random=False))
def test_mutated_manifests(random: Random) -> None:
    text = mutated_json(random, random.choice([*KINDS, RECORDS, RECORDS]))
    try:
        manifest = Manifest.from_json(text)
    except BundleError:
        return
    assert render(describe_bundle(Bundle(Path("bundle"), manifest, {}), verified=False))
    assert Manifest.from_json(manifest.to_json()) == manifest
