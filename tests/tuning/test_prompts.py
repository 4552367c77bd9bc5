"""Prompts come from documents the routers have not seen, and no document serves both choice and test."""

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tide_export.data.documents import Documents
from tide_export.errors import BundleError, DatasetError, TuneError
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.tuning.prompts import Prompts, draw_prompts

LENGTH = 12


def name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def document(number: int, words: int = 200) -> str:
    """Text that says in every few tokens which document it is from."""
    return " ".join(f"v{number}_{i}" for i in range(words))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> BundleTokenizer:
    return BundleTokenizer(demo_model)


@pytest.fixture
def draw(tmp_path: Path, tokenizer: BundleTokenizer):
    def draw(texts: list[str], calibration: dict | None = None, tokenizer=tokenizer, **options) -> Prompts:
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        settings = {"length": LENGTH, "count": 60, "per_document": 1, "seed": 0} | options
        return draw_prompts(str(path), tokenizer, calibration, **settings)

    return draw


@pytest.fixture
def sources(tokenizer: BundleTokenizer):
    """Which documents prompts are from, by the `v<number>_` inside them."""

    def sources(prompts: list[list[int]]) -> list[int]:
        return [int(re.search(r"v(\d+)_", tokenizer.decode(ids))[1]) for ids in prompts]

    return sources


def test_prompts_are_stretches_of_the_documents_as_generate_would_read_them(draw, tokenizer):
    texts = [document(number) for number in range(6)]
    drawn = draw(texts)
    for ids in drawn.path + drawn.calibration:
        assert len(ids) == LENGTH
        assert ids[: len(tokenizer.prefix())] == tokenizer.prefix()
        assert any(tokenizer.decode(ids).strip() in text for text in texts)
    assert drawn.dataset_sha256 == hashlib.sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()


@pytest.fixture
def bos_tokenizer(demo_model: Path, tmp_path: Path) -> BundleTokenizer:
    """The demo's, but with token 1 before every text and token 2 behind it, and cutting texts at 5 tokens."""
    made = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    first, last = made.id_to_token(1), made.id_to_token(2)
    made.post_processor = TemplateProcessing(single=f"{first} $A {last}", special_tokens=[(first, 1), (last, 2)])
    made.enable_truncation(5)
    made.save(str(tmp_path / "tokenizer.json"))
    return BundleTokenizer(tmp_path)


def test_a_prompt_begins_with_what_the_tokenizer_puts_first(draw, bos_tokenizer):
    assert bos_tokenizer.prefix() == [1]
    assert bos_tokenizer.encode("a = 1") == [1, *bos_tokenizer.encode_plain("a = 1"), 2]
    drawn = draw([document(number) for number in range(3)], tokenizer=bos_tokenizer)
    for ids in drawn.path + drawn.calibration:
        assert len(ids) == LENGTH
        assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 0)


def test_no_document_is_on_both_sides(draw, sources):
    drawn = draw([document(number) for number in range(12)], per_document=4, count=40)
    first, second = set(sources(drawn.path)), set(sources(drawn.calibration))
    assert not first & second
    assert (len(first), len(second)) == (drawn.path_documents, drawn.calibration_documents) == (4, 8)


def test_one_prompt_per_document_unless_told_otherwise(draw, sources):
    texts = [document(number) for number in range(9)]
    drawn = draw(texts)
    assert sorted(sources(drawn.path + drawn.calibration)) == list(range(9))
    drawn = draw(texts, per_document=3)
    assert sorted(sources(drawn.path + drawn.calibration)) == sorted(list(range(9)) * 3)


def test_prompts_are_dealt_evenly_and_no_more_than_asked_for(draw, sources):
    drawn = draw([document(number) for number in range(8)], per_document=50, count=20)
    found = sources(drawn.path + drawn.calibration)
    assert len(found) == 20
    assert {found.count(number) for number in range(8)} == {2, 3}


def test_prompts_of_one_document_do_not_overlap(draw, sources, tokenizer):
    texts = [document(number, 60) for number in range(2)]
    drawn = draw(texts, per_document=1000, count=1000)
    for side in (drawn.path, drawn.calibration):
        text = texts[sources(side[:1])[0]]
        starts = sorted((text.index(piece), len(piece)) for piece in map(tokenizer.decode, side))
        assert len(starts) == len(tokenizer.encode_plain(text)) // LENGTH > 10
        assert all(start + size <= following for (start, size), (following, _) in pairwise(starts))


def test_the_seed_decides(draw):
    texts = [document(number) for number in range(9)]
    assert draw(texts, seed=3) == draw(texts, seed=3)
    assert draw(texts, seed=3) != draw(texts, seed=4)


def test_reading_stops_when_there_are_enough(draw, sources):
    drawn = draw([document(number) for number in range(30)], count=5)
    assert sorted(sources(drawn.path + drawn.calibration)) == [0, 1, 2, 3, 4]


# --- what is left out ------------------------------------------------------------------------------------------------


def test_documents_the_routers_saw_are_left_out_wherever_they_are(draw, sources):
    texts = [document(number) for number in range(10)]
    record = {"document_hashes": [name(texts[number]) for number in (2, 7, 8)]}
    drawn = draw(texts, record)
    assert sorted(sources(drawn.path + drawn.calibration)) == [0, 1, 3, 4, 5, 6, 9]
    assert (drawn.seen, drawn.overlap) == (3, "per document")


def test_it_says_which_documents_the_prompts_are_from(draw, sources):
    texts = [document(number, words=20 + 40 * number) for number in range(9)]
    drawn = draw([*texts[:4], texts[1], "short", *texts[4:]], {"document_hashes": [name(texts[0])]}, per_document=5)
    per_prompt = [
        hashed for hashed, n in zip(drawn.document_hashes, drawn.document_prompts, strict=True) for _ in range(n)
    ]
    assert per_prompt == [name(texts[number]) for number in sources(drawn.path + drawn.calibration)]
    assert sorted(drawn.document_hashes) == sorted(map(name, texts[1:]))
    assert sum(drawn.document_prompts[: drawn.path_documents]) == len(drawn.path)


def test_the_hashes_are_those_that_reading_keeps(tmp_path, draw, sources):
    texts = [document(number) for number in range(5)]
    path = tmp_path / "seen.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:3]))
    documents = Documents(str(path))
    assert list(documents) == texts[:3]
    drawn = draw(texts, {"document_hashes": documents.hashes})
    assert sorted(sources(drawn.path + drawn.calibration)) == [3, 4]


def test_nothing_left_is_said_so(draw):
    texts = [document(number) for number in range(4)]
    with pytest.raises(TuneError, match=r"4 documents of which 0 can be used \(4 seen by the routers\)"):
        draw(texts, {"document_hashes": [name(text) for text in texts]})
    with pytest.raises(TuneError, match="4 documents of which 1 can be used"):
        draw(texts, {"document_hashes": [name(text) for text in texts[1:]]})


@pytest.mark.parametrize("record", [None, {}])
def test_routers_from_elsewhere_are_warned_about(draw, caplog, record):
    assert draw([document(number) for number in range(3)], record).overlap == "no"
    assert "no calibration record" in caplog.text


@pytest.mark.parametrize("hashes", ["ab", [1], {}])
def test_a_record_that_is_none_is_refused(draw, hashes):
    with pytest.raises(BundleError, match="document_hashes"):
        draw([document(1), document(2)], {"document_hashes": hashes})


def test_repeated_and_short_documents_are_left_out_and_counted(draw, sources):
    texts = [document(0), "short", document(1), document(0), document(2), document(0)]
    drawn = draw(texts)
    assert sorted(sources(drawn.path + drawn.calibration)) == [0, 1, 2]
    assert (drawn.duplicates, drawn.short, drawn.seen) == (2, 1, 0)


def test_text_that_gives_no_prompt_is_refused(draw, bos_tokenizer):
    with pytest.raises(TuneError, match=f"2 documents of which 0 can be used .2 shorter than {LENGTH} tokens"):
        draw(["a", "b"])
    with pytest.raises(DatasetError, match="holds no text"):
        draw([" "])
    with pytest.raises(TuneError, match="hold nothing but the 1 the tokenizer puts first"):
        draw([document(0), document(1)], length=1, tokenizer=bos_tokenizer)


def test_of_a_very_long_document_any_place_may_come(draw, monkeypatch):
    monkeypatch.setattr("tide_export.tuning.prompts.STRETCH_CHARS", 400)
    texts = [document(1, 3000), document(2, 3000)]
    assert len({str(draw(texts, seed=seed).path) for seed in range(5)}) == 5
