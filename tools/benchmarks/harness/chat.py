"""Reads the prompts of a file as a bundle's model is asked them."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tide_export.bundle.opened import Bundle
from tide_export.common.prompt_files import read_prompts
from tide_export.runtime.tokenizer import BundleTokenizer


def chat_prompts(bundle: Bundle, file: Path) -> list[list[int]]:
    """Token ids of each prompt, as a user's message where the bundle has a chat template."""
    prompts = read_prompts(file)
    if "chat_template.jinja" not in bundle.files:
        tokenizer = BundleTokenizer(bundle)
        return [tokenizer.encode(prompt) for prompt in prompts]
    template = AutoTokenizer.from_pretrained(bundle.path)
    found = []
    for prompt in prompts:
        message: Any = {"role": "user", "content": prompt}
        text = template.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        found.append(list(template(text, add_special_tokens=False)["input_ids"]))
    return found
