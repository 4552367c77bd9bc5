"""Every kind of dataset SPEC gives its documents; whatever cannot be read is one sentence that names it."""

import hashlib
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tide_export.data.documents import DOCUMENT_CHARS, Documents, split_documents
from tide_export.errors import DatasetError


def read(spec):
    return list(Documents(str(spec)))


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first\n\nsecond, with ümläute\n")
    assert read(path) == ["first\n\nsecond, with ümläute\n"]


def test_hashes_are_of_the_documents_handed_out(write_jsonl):
    documents = Documents(str(write_jsonl("a.jsonl", [{"text": "one"}, {"text": " "}, {"text": "zwölf"}])))
    assert documents.hashes == []
    for text in documents:
        assert documents.hashes[-1] == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert len(documents.hashes) == documents.count == 2


def test_jsonl_rows_are_documents_and_blank_ones_are_skipped(write_jsonl):
    path = write_jsonl("a.jsonl", [{"source": "x", "text": "one"}, {"text": " \n"}, {"text": None}, {"text": "two"}])
    assert read(path) == ["one", "two"]


def test_json_array(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert read(path) == ["one", "two"]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["one", "two"]}), path)
    assert read(path) == ["one", "two"]


def test_first_string_column_where_none_is_called_text(write_jsonl):
    assert read(write_jsonl("a.jsonl", [{"id": 3, "code": "one", "path": "p"}])) == ["one"]


def test_folder_reads_its_text_files_in_order(tmp_path, write_jsonl):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "notes.md").write_text("not read")
    write_jsonl("b.jsonl", [{"text": "two"}])
    assert read(tmp_path) == ["one", "two", "three"]


def test_glob_may_name_any_suffix(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("one")
    (tmp_path / "b.py").write_text("two")
    assert sorted(read(tmp_path / "**" / "*.py")) == ["one", "two"]


def test_brackets_in_a_file_name_are_no_pattern(write_jsonl):
    assert read(write_jsonl("a[1].jsonl", [{"text": "one"}])) == ["one"]


def test_lone_surrogates_do_not_reach_the_tokenizer(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"text": "a\ud800b"}]))
    assert read("some/dataset") == ["a?b"]


def test_count_and_hash_cover_what_was_handed_out(write_jsonl):
    documents = Documents(str(write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}, {"text": "three"}])))
    stream = iter(documents)
    assert [next(stream), next(stream)] == ["one", "two"]
    assert documents.count == 2
    assert documents.sha256 == hashlib.sha256(b"one\0two\0").hexdigest()


def test_wikitext_articles_are_documents():
    lines = [" \n", " = First = \n", " \n", " text \n", " = = Section = = \n", " more \n", " = Second = \n", " end \n"]
    parts = [part for part in split_documents(lines) if part.strip()]
    assert [part.strip().splitlines()[0].strip() for part in parts] == ["= First =", "= Second ="]
    assert "".join(split_documents(lines)) == "".join(lines)


def test_large_text_is_cut_at_blank_lines_and_bounded():
    paragraph = ("word " * 30 + "\n") * 20 + "\n"
    text = paragraph * 80
    parts = list(split_documents(text.splitlines(keepends=True)))
    assert "".join(parts) == text
    assert len(parts) > 2
    assert all(DOCUMENT_CHARS <= len(part) <= DOCUMENT_CHARS + len(paragraph) for part in parts[:-1])
    assert all(part.endswith("\n\n") for part in parts[:-1])

    solid = ["x" * 99 + "\n"] * 4000
    assert max(map(len, split_documents(solid))) <= 2 * DOCUMENT_CHARS + 100


def test_one_endless_line_is_bounded_too(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * (5 * DOCUMENT_CHARS))
    parts = read(path)
    assert max(map(len, parts)) <= 3 * DOCUMENT_CHARS
    assert "".join(parts) == path.read_text()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": "bro', "broken"),
        ("a.json", b"not json", "broken"),
        ("a.parquet", b"PAR1 and then nothing", "broken"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": ""}\n{"text": "  "}\n', "holds no text"),
        ("a.txt", b" \n \n", "holds no text"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"id": 1, "size": 2}\n', "no column of text"),
        ("a.jsonl", b'{"text": [1, 2]}\n', "holds list, not text"),
    ],
)
def test_unusable_file(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["./missing", "missing.txt", "~/missing.parquet", "/no/such/folder", "a/b/c"])
def test_missing_file_is_told_at_once(spec):
    with pytest.raises(DatasetError, match="no such file or folder"):
        Documents(spec)


def test_glob_without_a_match(tmp_path):
    with pytest.raises(DatasetError, match="no file matches"):
        Documents(str(tmp_path / "*.txt"))


def test_folder_without_text(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(DatasetError, match="folder holds no"):
        Documents(str(tmp_path))


class Hub:
    """Stands where `datasets.load_dataset` does: no test needs a network."""

    def __init__(self, rows=None, error=None):
        self.rows, self.error, self.asked = rows, error, None

    def __call__(self, *args, **options):
        self.asked = args, options
        if self.error:
            raise self.error
        return iter(self.rows)


@pytest.mark.parametrize(
    ("spec", "name", "split"),
    [
        ("some/data", ("some/data", None), "train"),
        ("some/data:small", ("some/data", "small"), "train"),
        ("some/data:small:test", ("some/data", "small"), "test"),
        ("some/data::test", ("some/data", None), "test"),
        ("wikitext", ("Salesforce/wikitext", "wikitext-103-raw-v1"), "train"),
        ("wikitext:wikitext-2-raw-v1:test", ("Salesforce/wikitext", "wikitext-2-raw-v1"), "test"),
    ],
)
def test_hub_id(monkeypatch, spec, name, split):
    hub = Hub([{"text": "one"}])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert [text.strip() for text in Documents(spec)] == ["one"]
    assert hub.asked == (name, {"streaming": True, "split": split})


def test_rows_of_the_hubs_wikitext_are_joined_to_articles(monkeypatch):
    rows = ["", " = First = \n", "", " text \n", " = Second = \n", "", " end \n"]
    monkeypatch.setattr(datasets, "load_dataset", Hub([{"text": row} for row in rows]))
    assert list(Documents("wikitext")) == [" = First = \n\n text \n", " = Second = \n\n end \n"]


def test_unreachable_hub(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", Hub(error=ConnectionError("Couldn't reach\n it")))
    with pytest.raises(DatasetError, match="'some/data' cannot be read: Couldn't reach it; --dataset FILE"):
        list(Documents("some/data"))


def test_hub_that_breaks_in_the_middle(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise OSError("connection lost")

    monkeypatch.setattr(datasets, "load_dataset", Hub(rows()))
    with pytest.raises(DatasetError, match="connection lost"):
        list(Documents("some/data"))


def test_bundled_texts_are_disjoint():
    folder = Path(__file__).parents[2] / "calibration" / "text"
    train, held_out = (set(Documents(str(folder / f"python-stdlib{end}.jsonl"))) for end in ("", "-validation"))
    assert len(train) == 13
    assert len(held_out) == 10
    assert not train & held_out
