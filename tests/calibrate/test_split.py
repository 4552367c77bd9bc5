"""Documents are not shared between training and validation, and small datasets are still split."""

import pytest

from tide_export.calibrate.sequences import TokenSequence
from tide_export.calibrate.split import split_sequences
from tide_export.errors import CalibrationError


def make(*lengths):
    """One list of sequence lengths per document."""
    return [TokenSequence(d, [7] * n) for d, document in enumerate(lengths) for n in document]


def documents(sequences):
    return {sequence.document for sequence in sequences}


def test_no_document_on_both_sides():
    sequences = make(*([10] * (1 + d % 5) for d in range(40)))
    split = split_sequences(sequences, 0.2, seed=0)
    assert split.unit == "documents"
    assert not documents(split.train) & documents(split.validation)
    assert len(split.train) + len(split.validation) == len(sequences)
    share = sum(len(s.ids) for s in split.validation) / sum(len(s.ids) for s in sequences)
    assert 0.15 <= share <= 0.2


def test_seed_decides():
    sequences = make(*([10] for _ in range(40)))
    assert split_sequences(sequences, 0.2, seed=1) == split_sequences(sequences, 0.2, seed=1)
    assert split_sequences(sequences, 0.2, seed=1) != split_sequences(sequences, 0.2, seed=2)


@pytest.mark.parametrize("seed", range(5))
def test_giant_document_is_never_validation(seed):
    split = split_sequences(make([50] * 40, *([50] for _ in range(20))), 0.2, seed)
    assert 0 in documents(split.train)
    assert split.unit == "documents"


def test_few_documents_give_one_to_validation():
    split = split_sequences(make([10, 10], [10, 10], [10, 10]), 0.2, seed=0)
    assert split.unit == "documents"
    assert len(documents(split.validation)) == 1
    assert len(documents(split.train)) == 2


@pytest.mark.parametrize("lengths", [([10] * 10,), ([10] * 10, [2])])
def test_too_few_documents_are_split_by_sequence(lengths):
    split = split_sequences(make(*lengths), 0.2, seed=0)
    assert split.unit == "sequences"
    assert len(split.validation) == 2


def test_two_sequences_are_enough_and_one_is_not():
    split = split_sequences(make([10, 10]), 0.9, seed=0)
    assert len(split.train) == len(split.validation) == 1
    with pytest.raises(CalibrationError, match="at least 2"):
        split_sequences(make([10]), 0.2, seed=0)
