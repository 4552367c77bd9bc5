"""Text that streams: pieces join to the whole, and no piece ends inside a character."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from beside import turns_beside
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tide_export.common.prompt_files import Beginning, read_prompts
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.tokenizer import LONGEST_CONTEXT, PENDING, REPLACEMENT, BundleTokenizer, LateText

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


class Counting(BundleTokenizer):
    """Keeps how many tokens each decoding was of."""

    def __init__(self, folder: Path, described: Tokenizer, special: str) -> None:
        described.add_special_tokens([special])
        described.save(str(folder / "tokenizer.json"))
        super().__init__(folder)
        self.counts = list[int]()

    def decode(self, ids: Sequence[int], shown: Sequence[int] = ()) -> str:
        self.counts.append(len(ids))
        return super().decode(ids, shown)


def of_bytes(*longer: str) -> Tokenizer:
    """One whose tokens are bytes, the pairs of tokens in `longer`, and pairs of these."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in longer)]
    merges = [(first, second) for first, second in (pair.split() for pair in longer)]
    made = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(vocabulary)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def with_byte_fallback() -> Tokenizer:
    """One whose vocabulary has a few characters; others are tokens of their bytes, which are decoded together."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocabulary = {text: token for token, text in enumerate(texts)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


@pytest.mark.parametrize(("made", "byte"), [(of_bytes(), "Ģ"), (with_byte_fallback(), "<0x80>")])
def test_what_is_no_character_is_decoded_a_few_tokens_at_a_time(tmp_path: Path, made: Tokenizer, byte: str):
    tokenizer, count = Counting(tmp_path, made, "<end>"), 300
    wrong, end = made.token_to_id(byte), made.token_to_id("<end>")
    space, letter, a = (tokenizer.encode_plain(text) for text in (" a", "b", "a"))
    for prompt, tokens, text in (
        ([wrong] * count, [wrong] * count, REPLACEMENT * count),
        ([wrong] * count, a, "a"),
        (letter, [wrong] * count + space, REPLACEMENT * count + " a"),
        (letter, [end] * count + space, " a"),  # a space at the beginning of a text would be left out
        (letter, [wrong] + [end] * count, REPLACEMENT),
    ):
        tokenizer.counts.clear()
        assert LateText(tokenizer, prompt).of(tokens, ended=True) == text
        assert max(tokenizer.counts) <= LONGEST_CONTEXT + PENDING + 1
        assert len(tokenizer.counts) <= 6 * len(tokens) + LONGEST_CONTEXT


def test_characters_that_share_tokens_are_whole_and_do_not_wait_for_the_last(tmp_path: Path):
    """Each token of flags ends within a character but the last."""
    ((mapped, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🇩")
    start, d = mapped[:3], mapped[3]
    made = of_bytes(f"{start[0]} {start[1]}", f"{start[:2]} {start[2]}", f"{d} {start}")
    tokenizer, text = Counting(tmp_path, made, "<end>"), "🇩" * 30
    ids = tokenizer.encode_plain(text)
    assert len(ids) == 31
    for prompt in ("x", "🇩🇩🇩"):
        pieces = list(tokenizer.stream(tokenizer.encode_plain(prompt), ids))
        assert "".join(pieces) == text
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert len(pieces) > 2


@pytest.mark.parametrize("text", ["👩‍👩‍👧" * 6, REPLACEMENT * 25 + "é", ("é" + REPLACEMENT * 2 + "🙂") * 3])
@pytest.mark.parametrize("prompt", ["b", "👩‍👩‍👧é", REPLACEMENT + "é"])
def test_bytes_that_are_decoded_together_are_whole_characters(tmp_path: Path, prompt: str, text: str):
    tokenizer = Counting(tmp_path, with_byte_fallback(), "<end>")
    ids = tokenizer.encode_plain(text)
    assert "".join(tokenizer.stream(tokenizer.encode_plain(prompt), ids)) == text


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
