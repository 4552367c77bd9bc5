"""The first layers of the demo model, for tests that trace or quantize a trained model and need no depth."""

from pathlib import Path

from tide_export.model.source import load_model


def first_layers(demo_model: Path, count: int, folder: Path) -> Path:
    """Writes so many layers of the demo model, with its tokenizer."""
    model = load_model(str(demo_model)).model
    del model.model.layers[count:]
    model.config.num_hidden_layers = count
    model.config.layer_types = None
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model / name).read_bytes())
    return folder
