"""A tokenizer file that cannot encode every text, or lets text grow without bound, is refused before it gets any."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from tokenizers_to_mutate import BYTES, FILES, bpe, replace, sequence, template, tokenizer, unigram, word_piece

from tide_export.bundle.tokenizer_check import MAX_STEPS
from tide_export.errors import BundleError, GenerationError, ModelError
from tide_export.runtime.tokenizer import MAX_BYTES, BundleTokenizer

LONG = "x" * 40
NO_UNK = {"a": 0, "b": 1}


def opened(folder: Path, contents: dict[str, Any]) -> BundleTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    return BundleTokenizer(folder)


@pytest.mark.parametrize("number", range(len(FILES)))
def test_ordinary_files_are_taken(tmp_path: Path, number: int) -> None:
    tokens = opened(tmp_path, FILES[number])
    assert tokens.decode(tokens.encode("a ab 1")) is not None


def rules(count: int, content: str) -> list[dict[str, Any]]:
    """Replacements of as many characters, none of which is written by another."""
    return [replace(chr(0x1F600 + number), content) for number in range(count)]


@pytest.mark.parametrize(
    "contents",
    [
        tokenizer(normalizer=sequence("normalizers", *rules(50, ":a_face_with_tears:"), {"type": "Lowercase"})),
        tokenizer(
            normalizer=sequence("normalizers", replace("&", "&amp;"), replace("<", "&lt;"), replace(">", "&gt;"))
        ),
        tokenizer(normalizer=sequence("normalizers", *[replace("\\s+", " ", "Regex")] * 20)),
    ],
)
def test_many_rules_that_do_not_feed_each_other_are_taken(tmp_path: Path, contents: dict[str, Any]) -> None:
    assert opened(tmp_path, contents).encode("a <b>")


@pytest.mark.parametrize(
    ("part", "component"),
    [
        ("normalizer", sequence("normalizers", *[replace("a", "a" * 10)] * 10)),
        ("normalizer", sequence("normalizers", replace("a", "b" * 40), replace("b", "c" * 40))),
        ("normalizer", sequence("normalizers", sequence("normalizers", replace("", LONG)), replace("", LONG))),
        ("normalizer", sequence("normalizers", *[replace("x*", "xx", "Regex")] * 10)),
        ("normalizer", replace("(", LONG * 100, "String")),
        ("normalizer", sequence("normalizers", *[{"type": "Lowercase"}] * (MAX_STEPS + 1))),
        ("pre_tokenizer", sequence("pretokenizers", *[BYTES] * 12)),
        ("post_processor", template(*["$"] * 1001)),
        ("decoder", sequence("decoders", *[replace("a", "a" * 10)] * 10)),
    ],
)
def test_text_may_not_grow_without_bound(tmp_path: Path, part: str, component: dict[str, Any]) -> None:
    direction = "decoding" if part == "decoder" else "encoding"
    says = rf"tokenizer\.json' is refused: its {direction} may make text more than 1000 times as long"
    with pytest.raises(BundleError, match=says):
        opened(tmp_path, tokenizer(**{part: component}))


UNUSABLE = {
    "WordPiece": (tokenizer(word_piece(vocab=NO_UNK)), "cannot encode every text: WordPiece error: Missing [UNK]"),
    "WordLevel": (
        tokenizer({"type": "WordLevel", "vocab": NO_UNK, "unk_token": "[UNK]"}),
        "cannot encode every text: WordLevel error: Missing [UNK]",
    ),
    "Unigram": (tokenizer(unigram(unk_id=None)), "cannot encode every text: Encountered an unknown token"),
    "BPE": (tokenizer(bpe(unk_token="<unk>")), "cannot encode every text: Unk token `<unk>` not found"),
    "template": (
        tokenizer(post_processor=template("[Y]", "$")),
        "is not usable: its post_processor adds the token '[Y]' and does not define it",
    ),
    "template in a sequence": (
        tokenizer(post_processor=sequence("processors", BYTES, template("[Y]", "$", defined=()))),
        "is not usable: its post_processor adds the token '[Y]' and does not define it",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_encode_every_text_is_refused(tmp_path: Path, name: str) -> None:
    contents, says = UNUSABLE[name]
    with pytest.raises(BundleError) as error:
        opened(tmp_path, contents)
    assert says in str(error.value)
    assert str(tmp_path / "tokenizer.json") in str(error.value)


@pytest.mark.parametrize("name", ["WordPiece", "template"])
def test_the_source_is_refused_before_it_is_calibrated(tmp_path: Path, demo_model: Path, name: str) -> None:
    from tide_export.pipeline.flow import export

    contents, says = UNUSABLE[name]
    model = tmp_path / "model"
    model.mkdir()
    for file in demo_model.iterdir():
        if file.is_file() and not file.name.startswith("tokenizer"):
            (model / file.name).symlink_to(file)
    (model / "tokenizer.json").write_text(json.dumps(contents))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelError) as error:
        export(str(model), tmp_path / "bundle")
    assert f"the tokenizer of model '{model}' {says}" in str(error.value)
    assert not (tmp_path / "bundle").exists()


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(BundleError, match=r"tokenizer\.json' is too large: a tokenizer has at most 134217728 bytes"):
        BundleTokenizer(tmp_path)


def test_what_fails_later_is_one_sentence(tmp_path: Path) -> None:
    """A regular expression that gives up after ten million tries, with a panic."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokens = opened(tmp_path, tokenizer(pre_tokenizer=split))
    with pytest.raises(
        GenerationError, match="the bundle's tokenizer cannot encode the text: Onig: Regex search error"
    ):
        tokens.encode("a" * 28 + "b")
