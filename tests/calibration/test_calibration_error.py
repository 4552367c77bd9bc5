"""The calibration error equals what one computes by hand, and bins hold what they should."""

import numpy as np
import pytest

from tide_export.calibration.calibration_error import expected_calibration_error, reliability


def test_by_hand():
    scores = np.array([0.1, 0.3, 0.6, 0.8], np.float32)
    labels = np.array([False, True, True, True])
    # Bins {.1, .3} and {.6, .8}: |.2 - .5| and |.7 - 1|.
    assert expected_calibration_error(scores, labels, bins=2) == pytest.approx(0.3)
    # One bin: |.45 - .75|; four: .1, .7, .4, .2.
    assert expected_calibration_error(scores, labels, bins=1) == pytest.approx(0.3)
    assert expected_calibration_error(scores, labels, bins=4) == pytest.approx(1.4 / 4)


def test_the_order_of_tokens_does_not_matter():
    random = np.random.default_rng(0)
    scores = random.integers(0, 7, 500).astype(np.float32) / 7
    labels = random.uniform(size=500) < 0.4
    mixed = random.permutation(500)
    found, again = reliability(scores, labels, 15), reliability(scores[mixed], labels[mixed], 15)
    assert np.allclose(found.share, again.share)
    assert found.count.tolist() == again.count.tolist()
    assert len(found.count) == 7  # equal scores are one bin
    assert found.score == pytest.approx(np.arange(7) / 7)


def test_bins_of_equal_mass():
    scores = np.random.default_rng(1).beta(8, 1, 1501).astype(np.float32)
    found = reliability(scores, scores > 0.5, 15)
    assert found.count.sum() == 1501
    assert set(found.count) <= {100, 101}
    assert (np.diff(found.score) > 0).all()


def test_probabilities_have_nearly_none_and_overconfidence_has_some():
    random = np.random.default_rng(2)
    scores = random.uniform(size=60000).astype(np.float32)
    labels = random.uniform(size=60000) < scores
    assert expected_calibration_error(scores, labels) < 0.01
    assert expected_calibration_error(scores**0.25, labels) == pytest.approx(0.8 - 0.5, abs=0.01)


@pytest.mark.parametrize("label", [True, False])
def test_one_class_alone(label):
    scores = np.full(40, 0.9, np.float32)
    error = expected_calibration_error(scores, np.full(40, label))
    assert error == pytest.approx(0.1 if label else 0.9)


@pytest.mark.parametrize(("scores", "labels", "bins"), [(0, 0, 5), (3, 2, 5), (3, 3, 0)])
def test_nonsense_is_refused(scores, labels, bins):
    with pytest.raises(ValueError, match="cannot put"):
        reliability(np.zeros(scores), np.zeros(labels, bool), bins)
