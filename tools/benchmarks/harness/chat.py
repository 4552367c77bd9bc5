"""Reads the prompts of a file as a bundle's model is asked them."""

from pathlib import Path

from transformers import AutoTokenizer

from tide_export.bundle.opened import Bundle
from tide_export.calibration.self_generated import encode_prompt
from tide_export.common.prompt_files import read_prompts


def chat_prompts(bundle: Bundle, file: Path) -> list[list[int]]:
    """Token ids of each prompt, as a user's message where the bundle has a chat template, but for beginnings."""
    tokenizer = AutoTokenizer.from_pretrained(bundle.path)
    return [encode_prompt(tokenizer, prompt) for prompt in read_prompts(file)]
