"""Gives the prompts of `prompts.txt`, and those that the forms in `prompts.toml` are expanded into.

They are questions, code, edits, translations and more. Each line of `prompts.txt` is a form of its own.
"""

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("prompts.toml")
WRITTEN = FILE.with_suffix(".txt")
WRITTEN_WEIGHT = 300  # of all lines of `prompts.txt`, beside families of 100: until none is left
PLACEHOLDER = re.compile(r"\{([a-z_]+?)(_\d)?\}")
NUMBERS = {"number": 99, "small": 20}  # largest value
PARAGRAPH = "paragraph"
SENTENCES = (2, 5)  # of a paragraph
TYPO_SHARE = 0.3  # of paragraphs that have typing errors
TYPO_RATE = 0.08  # of their words
ATTEMPTS = 20  # per prompt, to find one that is new


def shipped_prompts(seed: int, count: int, chat: bool) -> dict[str, str]:
    """Returns about `count` different prompts, each with the form that it was filled from.

    Args:
        chat: prompts for a model that answers; otherwise beginnings of texts and code, which a model continues.
    """
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    families = content["prompts" if chat else "beginnings"]
    if chat:
        families.append({"weight": WRITTEN_WEIGHT, "forms": WRITTEN.read_text(encoding="utf-8").splitlines()})
    weights = [family["weight"] for family in families]
    generator = random.Random(seed)
    prompts: dict[str, str] = {}
    for _ in range(count * ATTEMPTS):
        if len(prompts) == count:
            break
        family = generator.choices(families, weights)[0]
        form = generator.choice(family["forms"])
        prompts.setdefault(_filled(form, content["words"], generator, {}), form)
    return prompts


def _filled(form: str, words: Mapping[str, Sequence[str]], generator: random.Random, chosen: dict[str, str]) -> str:
    """Fills the placeholders of a form, from `chosen` or at random, and adds the new choices to it."""

    def value(match: re.Match[str]) -> str:
        name, key = match[1], match[0]
        if key not in chosen:
            if name in NUMBERS:
                chosen[key] = str(generator.randint(2, NUMBERS[name]))
            elif name == PARAGRAPH:
                chosen[key] = _paragraph(words, generator, chosen)
            else:
                used = set(chosen.values())
                chosen[key] = generator.choice([word for word in words[name] if word not in used])
        return chosen[key]

    return PLACEHOLDER.sub(value, form)


def _paragraph(words: Mapping[str, Any], generator: random.Random, chosen: dict[str, str]) -> str:
    """Returns sentences about one person: the one that the form names, or a random one."""
    chosen.setdefault("{name}", generator.choice(words["name"]))
    person = {"{name}": chosen["{name}"]}
    count = generator.randint(*SENTENCES)
    text = " ".join(_filled(generator.choice(words["sentence"]), words, generator, dict(person)) for _ in range(count))
    if generator.random() >= TYPO_SHARE:
        return text
    return " ".join(_mistyped(word) if generator.random() < TYPO_RATE else word for word in text.split())


def _mistyped(word: str) -> str:
    """Swaps the second and the third letter of a longer word."""
    return word[0] + word[2] + word[1] + word[3:] if len(word) > 4 else word
