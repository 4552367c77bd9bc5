"""Reads the files of a published draft head."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from tide_export.errors import DraftError, UnsupportedModelError, first_line
from tide_export.model.quantized_files import ADVICE, dequantized

FILES = ("config.json", "*.safetensors", "*.bin")


def head_folder(name: str) -> Path:
    """The folder of a head, from the hub if `name` is none; raises DraftError."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the hub's client raises many kinds
        raise DraftError(
            f"no draft head {name!r}: no such folder, and the hub does not have it or cannot be reached "
            f"({first_line(error)})"
        ) from error


def head_config(folder: Path, name: str) -> dict[str, Any]:
    """The fields of config.json, those of the layer beside the others; raises DraftError."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return config | dict(config.get("transformer_layer_config") or {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DraftError(f"the config.json of draft head {name!r} cannot be read: {first_line(error)}") from error


def head_weights(folder: Path, name: str, quantization: Any) -> dict[str, torch.Tensor]:
    """All weights, dequantized, by name; raises DraftError."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    weights: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            plain = file.suffix == ".bin"
            weights |= torch.load(file, map_location="cpu", weights_only=True) if plain else load_file(file)
        weights = dequantized(weights, quantization, f"draft head {name!r}")
    except UnsupportedModelError as error:
        raise DraftError(str(error).replace(ADVICE, "give it as it was before")) from error
    except Exception as error:  # torch and safetensors raise many kinds
        raise DraftError(f"the weights of draft head {name!r} cannot be read: {first_line(error)}") from error
    if not weights:
        raise DraftError(f"draft head {name!r} has no weights: neither *.safetensors nor *.bin, so download it again")
    return weights
