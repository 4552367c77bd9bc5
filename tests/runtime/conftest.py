"""Bundles of the hand-made model, written for the whole session and opened once."""

from pathlib import Path

import pytest
from tiny_model import TinyModel, write_networks

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.runtime.engine import Engine, load


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
        write_networks(folder, model.described(), **options)
        write_manifest(folder, model.manifest())
    return folder.parent / "wide"
