"""Bundles of the hand-made model, written for the whole session and opened once; prompts of several lengths, and
thresholds that divide their tokens, for whatever `engine` a test module has."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_model import TinyModel

from tide_export.bundle.file_names import GRAPH_FILE, WEIGHTS_FILE
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import MAX_THRESHOLD

LENGTHS = (1, 37, 100, 2, 18)


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="session")
def tiny_bundle(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="session")
def tiny_engine(tiny_bundle: Path) -> Engine:
    return load(tiny_bundle, threads=1)


@pytest.fixture(scope="session")
def wide_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose embedding and head are in the file of the weights, as in bundles of real models."""
    model = TinyModel(vocabulary=5000)
    with writing_bundle(tmp_path_factory.mktemp("bundles") / "wide") as folder:
        options = {"save_as_external_data": True, "location": WEIGHTS_FILE, "size_threshold": 1 << 16}
        onnx.save(model.described(), folder / GRAPH_FILE, **options)
        write_manifest(folder, model.manifest())
    return folder.parent / "wide"


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[100 * number : 100 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def mixed(engine: Engine, demo_text_ids: list[int]) -> list[float]:
    """Thresholds that about a third of what reaches each checkpoint passes, whatever the routers were trained on.

    The first token of a propagating bundle runs at full depth and is not scored: NaN."""
    state = engine.start([MAX_THRESHOLD] * len(engine.manifest.checkpoints))
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[600:700]])
    return np.clip(np.nanquantile(scores, 0.66, axis=0), 0.0, 1.0).tolist()
