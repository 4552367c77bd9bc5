"""Mutated tokenizer files: every text is encoded and decoded, or one sentence refuses the file or the text."""

import json
from pathlib import Path
from random import Random

import pytest
from fuzz.settings import cases
from hypothesis import given
from hypothesis import strategies as st
from mutations import mutated_bytes, mutated_json
from tokenizers_to_mutate import FILES, combined

from tide_export.bundle.tokenizer_check import MAX_GROWTH
from tide_export.errors import TideError
from tide_export.runtime.tokenizer import BundleTokenizer, LateText

NORMALIZATION = 11  # times as long by Unicode normalization, at most
LONGEST = 32  # bytes of a token, after mutations
TEXTS = ("a ab [X] ba", "", "𓂀 1 1\n", "a" * 200, "é\u0301\ufdfa x", "\0\x7f")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@cases(150, 1000)
@given(random=st.randoms(use_true_random=False))
def test_mutated_tokenizers(folder: Path, random: Random) -> None:
    contents = combined(random) if random.random() < 0.6 else random.choice(FILES)
    text = json.dumps(contents).encode() if random.random() < 0.4 else mutated_json(random, contents, times=2).encode()
    if random.random() < 0.1:
        text = mutated_bytes(random, text)
    (folder / "tokenizer.json").write_bytes(text)
    try:
        tokens = BundleTokenizer(folder)
        for prompt in TEXTS:
            ids = tokens.encode_plain(prompt)
            assert len(ids) <= MAX_GROWTH * NORMALIZATION * max(1, len(prompt.encode()))
            assert len(tokens.decode([*ids, 0, 5, 2**32 - 1])) <= MAX_GROWTH * LONGEST * (len(ids) + 3)
            assert LateText(tokens, [1]).of(ids, ended=True) is not None
    except TideError:
        return
