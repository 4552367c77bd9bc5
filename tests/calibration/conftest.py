"""What the calibration tests share: the repository's own small trained model, its tokenizer, its bundled text."""

from pathlib import Path

import pytest

from tide_export.data.sequences import read_sequences
from tide_export.model.source import load_model

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"


@pytest.fixture(scope="session")
def demo():
    return load_model(ROOT / "demo" / "demo-llama")


@pytest.fixture(scope="session")
def sequences(tokenizer):
    """12 sequences of 48 tokens, from several documents."""
    return list(read_sequences(str(TEXT), tokenizer, length=48, limit=12))
