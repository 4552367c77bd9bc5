"""What the calibration tests share: the repository's own small trained model, its tokenizer, its bundled text."""

from pathlib import Path

import pytest

from tide_export.calibration import fast_attention
from tide_export.data.sequences import read_sequences
from tide_export.model.source import load_model

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"


@pytest.fixture(scope="session")
def demo():
    return load_model(ROOT / "demo" / "demo-llama")


@pytest.fixture(scope="module")
def compared_once():
    """Fused attention is compared with eager attention once for the same model and layers, not in each pass."""
    found = {}

    def agrees(source, text, layers):
        key = source.weights_sha256, tuple(layers)
        if key not in found:
            found[key] = compared(source, text, layers)
        return found[key]

    compared = fast_attention._agrees
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_attention, "_agrees", agrees)
        yield


@pytest.fixture(scope="session")
def sequences(tokenizer):
    """12 sequences of 48 tokens, from several documents."""
    return list(read_sequences(str(TEXT), tokenizer, length=48, limit=12))
