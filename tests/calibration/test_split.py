"""Documents are not shared between the three parts, training is the largest, and small datasets are still split."""

import numpy as np
import pytest

from tide_export.calibration.config import TideConfig
from tide_export.calibration.split import split_sequences
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError, ConfigError


def make(*lengths):
    """One list of sequence lengths per document."""
    return [TokenSequence(d, np.full(n, 7, np.int32)) for d, document in enumerate(lengths) for n in document]


def parts(split):
    return split.train, split.validation, split.test


def documents(sequences):
    return {sequence.document for sequence in sequences}


def tokens(sequences):
    return sum(len(sequence.ids) for sequence in sequences)


def test_no_document_in_two_parts():
    sequences = make(*([10] * (1 + d % 5) for d in range(60)))
    split = split_sequences(sequences, 0.2, 0.1, seed=0)
    assert split.unit == "documents"
    found = [documents(part) for part in parts(split)]
    assert set.union(*found) == set(range(60))
    assert sum(map(len, found)) == 60
    assert sum(map(len, parts(split))) == len(sequences)
    assert 0.15 <= tokens(split.validation) / tokens(sequences) <= 0.2
    assert 0.075 <= tokens(split.test) / tokens(sequences) <= 0.1


def test_seed_decides():
    sequences = make(*([10] for _ in range(40)))
    assert split_sequences(sequences, 0.2, 0.2, seed=1) == split_sequences(sequences, 0.2, 0.2, seed=1)
    assert split_sequences(sequences, 0.2, 0.2, seed=1) != split_sequences(sequences, 0.2, 0.2, seed=2)


def test_validation_does_not_decide_test():
    """So that tests of routers validated on more or less text can be compared."""
    sequences = make(*([10] for _ in range(40)))
    assert split_sequences(sequences, 0.1, 0.2, seed=0).test == split_sequences(sequences, 0.3, 0.2, seed=0).test != []


@pytest.mark.parametrize("seed", range(5))
def test_giant_document_is_for_training(seed):
    split = split_sequences(make([50] * 40, *([50] for _ in range(20))), 0.2, 0.1, seed)
    assert 0 in documents(split.train)
    assert split.unit == "documents"


def test_few_documents_give_one_each():
    split = split_sequences(make([10, 10], [10, 10], [10, 10]), 0.2, 0.2, seed=0)
    assert split.unit == "documents"
    assert [len(documents(part)) for part in parts(split)] == [1, 1, 1]


@pytest.mark.parametrize("lengths", [([10] * 10,), ([10] * 10, [2]), ([10] * 6, [10] * 6), ([10] * 10, [10], [1])])
def test_too_few_documents_are_split_by_sequence(lengths):
    sequences = make(*lengths)
    split = split_sequences(sequences, 0.2, 0.2, seed=0)
    assert split.unit == "sequences"
    assert [len(part) for part in parts(split)] == [len(sequences) - 4, 2, 2]
    assert [*split.train, *split.validation, *split.test] == sequences


@pytest.mark.parametrize("seed", range(30))
def test_training_is_the_largest_part_of_any_dataset(seed):
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 50, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 12))]
    sequences = make(*lengths, [5, 5, 5])
    validation, test = rng.choice([0.05, 0.1, 0.2, 0.33, 0.45], 2)
    if 1 - validation - test < max(validation, test):
        validation = test = 1 / 3
    split = split_sequences(sequences, validation, test, seed)
    size = tokens if split.unit == "documents" else len
    assert size(split.train) >= max(size(split.validation), size(split.test))
    assert min(size(split.validation), size(split.test)) > 0
    assert sum(map(len, parts(split))) == len(sequences)


def test_three_sequences_are_enough_and_two_are_not():
    split = split_sequences(make([10, 10, 10]), 0.4, 0.2, seed=0)
    assert [len(part) for part in parts(split)] == [1, 1, 1]
    with pytest.raises(CalibrationError, match=r"2 sequence\(s\): routers need at least 3"):
        split_sequences(make([10, 10]), 0.2, 0.2, seed=0)


@pytest.mark.parametrize("fractions", [(0.49, 0.2), (0.2, 0.49), (0.4, 0.4)])
def test_fractions_that_leave_too_little_for_training(fractions):
    with pytest.raises(ConfigError, match=r"validation_fraction .* test_fraction .* largest share for training"):
        TideConfig(validation_fraction=fractions[0], test_fraction=fractions[1])
