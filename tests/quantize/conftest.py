"""A model small enough to quantize in every test."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """The first two layers of the demo model, with its tokenizer."""
    from shallow_demo import first_layers

    return first_layers(demo_model, 2, tmp_path_factory.mktemp("models") / "two-layers")
