"""Sequences: bounded, complete, spread over documents, opened as the tokenizer opens a prompt."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tide_export.data import sequences as module
from tide_export.data.sequences import load_tokenizer, read_sequences
from tide_export.errors import ConfigError, DatasetError, ModelError


@pytest.fixture
def long_and_short(write_jsonl):
    """Document 0 has some 2000 tokens, documents 1 to 9 have some 40."""
    rows = [{"text": "value = 1\n" * 500}] + [{"text": f"name_{n} = {n}\n" * 8} for n in range(9)]
    return str(write_jsonl("docs.jsonl", rows))


def test_nothing_is_lost_or_longer_than_asked(long_and_short, tokenizer):
    found = list(read_sequences(long_and_short, tokenizer, length=32, limit=1000))
    assert max(len(sequence.ids) for sequence in found) == 32
    assert {sequence.ids.dtype for sequence in found} == {np.dtype(np.int32)}
    assert (
        list(chain.from_iterable(s.ids for s in found if s.document == 0))
        == tokenizer("value = 1\n" * 500)["input_ids"]
    )
    assert sorted({sequence.document for sequence in found}) == list(range(10))


def test_reading_stops_at_the_limit(long_and_short, tokenizer):
    assert len(list(read_sequences(long_and_short, tokenizer, length=8, limit=5))) == 5


def test_a_long_document_does_not_crowd_out_the_others(long_and_short, tokenizer):
    found = Counter(s.document for s in read_sequences(long_and_short, tokenizer, length=32, limit=20))
    assert set(found) == set(range(10))
    assert found[0] == max(found.values())
    assert sum(found.values()) == 20  # what the short ones do not give, the long one does


def test_rests_come_from_the_beginnings(long_and_short, tokenizer):
    found = [s.ids.tolist() for s in read_sequences(long_and_short, tokenizer, length=32, limit=20) if s.document == 0]
    whole = tokenizer("value = 1\n" * 500)["input_ids"]
    assert list(chain.from_iterable(found)) == whole[: 32 * len(found)]


def test_blocks_join_seamlessly(long_and_short, tokenizer, monkeypatch):
    whole = [s.ids.tolist() for s in read_sequences(long_and_short, tokenizer, length=32, limit=1000)]
    monkeypatch.setattr(module, "BLOCK_CHARS", 64)
    assert [s.ids.tolist() for s in read_sequences(long_and_short, tokenizer, length=32, limit=1000)] == whole


def test_every_sequence_opens_with_bos_where_the_tokenizer_adds_one(long_and_short, tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    with_bos = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = list(read_sequences(long_and_short, with_bos, length=32, limit=30))
    assert all(sequence.ids[0] == 0 and 0 not in sequence.ids[1:] for sequence in found)
    assert max(len(sequence.ids) for sequence in found) == 32
    with pytest.raises(ConfigError, match="hold nothing"):
        list(read_sequences(long_and_short, with_bos, length=1, limit=30))


def test_empty_text_is_an_error(write_jsonl, tokenizer):
    with pytest.raises(DatasetError, match="no text"):
        list(read_sequences(str(write_jsonl("a.jsonl", [{"text": ""}])), tokenizer, 8, 8))


def test_tokenizer_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{ broken")
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)
