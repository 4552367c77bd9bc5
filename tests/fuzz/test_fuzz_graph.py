"""Damaged graphs under a manifest with their hashes: a result, or one sentence; no crash, no hang, no memory."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import onnx
import pytest
from child import OUTCOMES, Child
from fuzz.settings import cases
from graphs import mutated_graph
from hypothesis import given
from hypothesis import strategies as st
from mutations import mutated_json

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from tiny_model import TinyModel, write_networks

from tide_export.bundle.file_names import MANIFEST_FILE, WEIGHTS_FILE, batch_file
from tide_export.bundle.store import write_manifest

TINY = TinyModel(layers=3, checkpoints=(1, 2), vocabulary=8)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    process = Child()
    yield process
    process.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose weights are in a file of their own."""
    bundle = tmp_path_factory.mktemp("graphs")
    write_networks(bundle, TINY.described(), save_as_external_data=True, location=WEIGHTS_FILE, size_threshold=0)
    return bundle


@cases(150, 800)
@given(random=st.randoms(use_true_random=False))
def test_mutated_graphs(child: Child, folder: Path, random: Random) -> None:
    file = folder / random.choice([batch_file(name) for name in TINY.networks()])
    whole = file.read_bytes()
    file.write_bytes(mutated_graph(random, onnx.load_model_from_string(whole)))
    write_manifest(folder, TINY.manifest())
    answer = child.run(folder)
    file.write_bytes(whole)
    assert answer.startswith(OUTCOMES), answer


@cases(100, 600)
@given(random=st.randoms(use_true_random=False))
def test_mutated_manifests_of_a_good_graph(
    child: Child, tmp_path_factory: pytest.TempPathFactory, random: Random
) -> None:
    bundle = tmp_path_factory.getbasetemp() / "good"
    if not bundle.exists():
        TINY.write(bundle)
        (bundle / "whole.json").write_bytes((bundle / MANIFEST_FILE).read_bytes())
    (bundle / MANIFEST_FILE).write_text(mutated_json(random, json.loads((bundle / "whole.json").read_text()), times=2))
    answer = child.run(bundle)
    assert answer.startswith(OUTCOMES), answer
