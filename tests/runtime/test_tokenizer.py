"""Text that streams: pieces join to the whole, and no piece ends inside a character."""

from pathlib import Path

import pytest
from beside import turns_beside

from tide_export.common.prompt_files import Beginning, read_prompts
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.tokenizer import REPLACEMENT, BundleTokenizer

MODEL = Path(__file__).parents[2] / "demo" / "demo-llama"  # a model folder has its tokenizer.json where a bundle has it


@pytest.fixture(scope="module")
def tokenizer() -> BundleTokenizer:
    return BundleTokenizer(MODEL)


@pytest.mark.parametrize(
    "text", ["return self._lines\n", "naïve £5 — “quoted”", "日本語 🙂🙂 👩‍👩‍👧 end", "\n\n    \t x", "é"]
)
@pytest.mark.parametrize("prompt", ["def f(x):", "é", "# 日本"])
def test_pieces_join_to_the_text_and_hold_whole_characters(tokenizer: BundleTokenizer, prompt: str, text: str):
    ids = tokenizer.encode(text)
    pieces = list(tokenizer.stream(tokenizer.encode(prompt), ids))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_complete(tokenizer: BundleTokenizer):
    ids = tokenizer.encode("one two three four")
    arrived: list[str] = []

    def tokens():
        for count, token in enumerate(ids):
            assert len(arrived) == count, "a token of plain ASCII must be out before the next is asked for"
            yield token

    for piece in tokenizer.stream(tokenizer.encode("x"), tokens()):
        arrived += [piece]


def test_a_character_cut_off_at_the_end_is_shown_as_in_a_plain_decoding(tokenizer: BundleTokenizer):
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1, "the test needs a character of several tokens"
    pieces = list(tokenizer.stream(tokenizer.encode("x"), ids[:-1]))
    assert "".join(pieces) == tokenizer.decode(ids[:-1])
    assert REPLACEMENT in pieces[-1]


def test_a_long_text_is_encoded_beside_other_threads(tokenizer: BundleTokenizer):
    text = "one two, <|endoftext|>日本\n" * 2000
    assert tokenizer.encode(text) == tokenizer._tokenizer.encode(text).ids
    assert tokenizer.encode_plain(text) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    assert turns_beside(lambda: tokenizer.encode("word " * 200_000)) > 20


def test_a_bundle_without_a_tokenizer_says_what_can_still_be_done(tmp_path: Path):
    with pytest.raises(BundleError, match=r"token ids"):
        BundleTokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        BundleTokenizer(tmp_path)


def test_an_empty_prompt_is_refused(tokenizer: BundleTokenizer):
    with pytest.raises(GenerationError, match="empty"):
        tokenizer.encode("")


@pytest.mark.parametrize("text", ["\ud800", "ab\udcff", "\ud83d x"])
def test_a_prompt_that_is_no_unicode_is_refused(tokenizer: BundleTokenizer, text: str):
    place = next(number for number, character in enumerate(text, 1) if "\ud800" <= character <= "\udfff")
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(GenerationError, match=f"the prompt is not valid Unicode: its character {place} is "):
            encode(text)


def test_prompts_are_lines_or_objects(tmp_path: Path):
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("one\n\ntwo \u2028 still two\n")
    objects.write_text('{"prompt": "one\\nmore", "id": 1}\n{"prompt": "two", "text": "2"}\n{"text": "three"}\n')
    assert read_prompts(text) == ["one", "two \u2028 still two"]
    prompts = read_prompts(objects)
    assert prompts == ["one\nmore", "two", "three"]
    assert [isinstance(prompt, Beginning) for prompt in prompts] == [False, False, True]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no prompts"),
        ("[1]\n", "entry 1"),
        ('{"prompt": "a"}\n{"texts": "b"}\n', "entry 2"),
        ("[" * 100_000, "entry 1 is no JSON object"),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}', "the prompt of entry 2 is not valid Unicode"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str, says: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(GenerationError, match=says):
        read_prompts(file)
