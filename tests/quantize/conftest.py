"""A model small enough to quantize in every test."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """The first two layers of the demo model, with its tokenizer."""
    from tide_export.model.source import load_model

    folder = tmp_path_factory.mktemp("models") / "two-layers"
    model = load_model(str(demo_model)).model
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    model.config.layer_types = None
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model / name).read_bytes())
    return folder
