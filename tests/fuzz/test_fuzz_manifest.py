"""Mutated manifests are parsed and described, or refused in one sentence; in C++ too (tests/cpp/test_cpp_manifest)."""

from pathlib import Path
from random import Random

import pytest
from fuzz.settings import cases
from hypothesis import given
from hypothesis import strategies as st
from manifests import TEXTS, manifests
from mutations import mutated_json

from tide_export.bundle.inspect import describe_bundle, render
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError

KINDS = manifests()
# Records as `calibrate` and `tune` write them, whose contents only `inspect` and `tune` read.
REPORT = {"1": {"exit_rate": 0.5, "precision": 1.0, "tokens": 3}, "2": {"exit_rate": None}}
RECORDS = KINDS[0] | {
    "calibration": {"dataset": "wikitext", "report": REPORT, "document_hashes": ["ab"]},
    "tuning": {"certified": True, "thresholds": [0.5, 1.0], "min_layers": 2, "path": [{"risk": 0.5, "p_value": None}]},
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_parsers_take_differently(name: str) -> None:
    text, refused = TEXTS[name]
    if refused is None:
        assert Manifest.from_json(text)
        return
    with pytest.raises(BundleError) as error:
        Manifest.from_json(text, source="'tide.json'")
    assert refused in str(error.value)


@cases(500)
@given(random=st.randoms(use_true_random=False))
def test_mutated_manifests(random: Random) -> None:
    text = mutated_json(random, random.choice([*KINDS, RECORDS, RECORDS]))
    try:
        manifest = Manifest.from_json(text)
    except BundleError:
        return
    assert render(describe_bundle(Bundle(Path("bundle"), manifest, {}), verified=False))
    assert Manifest.from_json(manifest.to_json()) == manifest
