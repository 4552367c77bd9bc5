"""Reads the prompts of a file as a bundle's model is asked them."""

from pathlib import Path

from transformers import AutoTokenizer

from tide_export.bundle.opened import Bundle
from tide_export.runtime.tokenizer import BundleTokenizer, read_prompts


def chat_prompts(bundle: Bundle, file: Path) -> list[list[int]]:
    """Token ids of each prompt, as a user's message where the bundle has a chat template."""
    prompts = read_prompts(file)
    if not (bundle.path / "chat_template.jinja").is_file():
        tokenizer = BundleTokenizer(bundle)
        return [tokenizer.encode(prompt) for prompt in prompts]
    template = AutoTokenizer.from_pretrained(bundle.path)
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [list(ids) for ids in template.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
