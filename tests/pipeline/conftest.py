"""A model that is quick to load: for what is refused before anything is calibrated."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_configs import small_llama
from transformers import LlamaForCausalLM


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A random Llama with the demo model's layers, context and tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    LlamaForCausalLM(small_llama(4096, 32, 12, 1024)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    return folder
