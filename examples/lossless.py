"""The full model's text, faster: exits and repeated text are drafts. python lossless.py BUNDLE"""

import sys
from pathlib import Path

from tokenizers import Tokenizer

import tide_export


def main(bundle: str) -> None:
    engine = tide_export.load(bundle)
    tokenizer = Tokenizer.from_file(str(Path(bundle) / "tokenizer.json"))
    prompt = tokenizer.encode("class Stack:\n    def push(self, item):\n").ids

    full = engine.generate(prompt, max_new_tokens=64, mode="full")
    lossless = engine.generate(prompt, max_new_tokens=64, mode="lossless")
    assert lossless.tokens == full.tokens, "greedy, the text is the same"

    print(tokenizer.decode(lossless.tokens))
    print(f"{lossless.stats.accepted} of {lossless.stats.drafted} drafts accepted")
    print(f"{lossless.stats.layers_run_per_token:.2f} of {lossless.stats.num_layers} layers per token")


if __name__ == "__main__":
    main(*sys.argv[1:])
