"""One engine for several threads, with streamed text and errors in one sentence: python embed_python.py BUNDLE"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

import tide_export


class TextService:
    """Answers prompts in text; `answer` may be called from any number of threads."""

    def __init__(self, bundle: str) -> None:
        self._engine = tide_export.load(bundle)
        self._tokenizer = Tokenizer.from_file(str(Path(bundle) / "tokenizer.json"))

    def answer(self, prompt: str, max_new_tokens: int = 32) -> Iterator[str]:
        """The text after `prompt`, piece by piece."""
        ids = self._tokenizer.encode(prompt).ids
        tokens, shown = [], ""
        for token in self._engine.stream(ids, max_new_tokens=max_new_tokens, mode="exit", threshold=0.7):
            tokens.append(token)
            text = self._tokenizer.decode(tokens)
            if not text.endswith("\ufffd"):  # a character may take several tokens
                yield text[len(shown) :]
                shown = text


def main(bundle: str) -> None:
    service = TextService(bundle)
    prompts = ["import os\n", "def main():\n", "class Queue:\n"]
    with ThreadPoolExecutor() as pool:
        for prompt, text in zip(prompts, pool.map(lambda p: "".join(service.answer(p)), prompts), strict=True):
            print(f"--- {prompt}{text}")
    try:
        list(service.answer("", max_new_tokens=0))
    except tide_export.TideError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
