"""Bundles of the hand-made model: one written for the whole session, opened once."""

from pathlib import Path

import pytest
from tiny_model import TinyModel

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
