"""Collecting: the right features beside the right labels, padding never used, memory independent of the text."""

import copy
import tracemalloc

import numpy as np
import pytest
import torch

from tide_export.calibrate.collect import collect
from tide_export.calibrate.sequences import TokenSequence
from tide_export.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.model import wrap_model

CHECKPOINTS = (3, 9)


def config(**options):
    return TideConfig.from_options(**options)


def reference(source, sequences, label):
    """Features and labels of all tokens, one sequence at a time, nothing padded: {checkpoint: (features, labels)}."""
    found = {layers: ([], []) for layers in CHECKPOINTS}
    for sequence in sequences:
        states = source.run(torch.tensor([sequence.ids]), [*CHECKPOINTS, source.num_layers])
        last = states.raw[source.num_layers][0]
        for layers in CHECKPOINTS:
            raw = states.raw[layers][0]
            normed = source.normed(raw)
            if label == "cosine":
                truth = torch.nn.functional.cosine_similarity(raw, last, dim=-1) > 0.98
            else:
                truth = source.head(normed[None])[0].argmax(-1) == states.logits[0].argmax(-1)
            found[layers][0].append(normed)
            found[layers][1].append(truth)
    return {layers: (torch.cat(x), torch.cat(y)) for layers, (x, y) in found.items()}


def rows_in(features, reference_features):
    """For each row of `features` the nearest row of the reference; fails where it is not the same state."""
    distances = torch.cdist(features, reference_features, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.min(dim=1)
    assert nearest.values.max() < 1e-3
    return nearest.indices


@pytest.mark.parametrize("label", ["agreement", "cosine"])
def test_states_and_labels_belong_together(demo, sequences, label):
    ragged = [TokenSequence(s.document, s.ids[: 5 + 7 * n]) for n, s in enumerate(sequences[:6])]
    expected = reference(demo, ragged, label)
    sample = collect(demo, ragged, CHECKPOINTS, config(label=label, calibration_batch=4), 10_000, "test")
    assert sample.kept == sample.seen == sum(len(s.ids) for s in ragged)
    for layers in CHECKPOINTS:
        features, labels = expected[layers]
        rows = rows_in(sample.features[layers], features)
        every = rows_in(features, features)  # documents that begin alike have states in common
        assert sorted(rows.tolist()) == sorted(every.tolist())
        assert (sample.labels[layers] == labels[rows]).float().mean() > 0.995  # padding may turn a near tie
        assert 0 < int(labels.sum()) < len(labels) or label == "cosine"


def test_a_sample_is_drawn_from_the_same_tokens(demo, sequences):
    expected = reference(demo, sequences, "agreement")
    sample = collect(demo, sequences, CHECKPOINTS, config(), 100, "test")
    assert sample.kept == 100
    assert sample.seen == sum(len(s.ids) for s in sequences)
    rows = {layers: rows_in(sample.features[layers], expected[layers][0]) for layers in CHECKPOINTS}
    assert rows[3].tolist() == rows[9].tolist()  # one token has one slot at every checkpoint
    assert rows[3].max() > 400  # from the whole stream, not its beginning
    assert sample.labels[9].tolist() == expected[9][1][rows[9]].tolist()


def test_ten_times_the_text_takes_no_more_memory(demo, sequences):
    def peak(text):
        tracemalloc.start()
        sample = collect(demo, text, (6,), config(), 256, "test")
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size, sum(t.nbytes for part in (sample.features, sample.labels) for t in part.values())

    small, large = peak(sequences), peak(sequences * 10)
    assert large[1] == small[1] == 256 * (demo.normed_size * 4 + 1)
    assert large[0] < small[0] + 200_000


def test_cosine_labels_do_not_depend_on_the_final_norm(demo, sequences):
    """They compare raw states, so another final norm changes every feature and not one label."""
    other = copy.deepcopy(demo.model)
    with torch.no_grad():
        other.model.norm.weight.copy_(torch.linspace(-3, 3, demo.hidden_size))
    options = config(label="cosine", convergence_threshold=0.97)
    samples = [collect(s, sequences, (9,), options, 1000, "test") for s in (demo, wrap_model(other, "other"))]
    assert 0.1 < samples[0].labels[9].float().mean() < 0.9
    assert torch.equal(samples[0].labels[9], samples[1].labels[9])
    assert not torch.isclose(samples[0].features[9], samples[1].features[9]).all(dim=1).any()


def test_heads_run_for_kept_tokens_only(demo, sequences, monkeypatch):
    rows = []
    head = type(demo).head
    monkeypatch.setattr(type(demo), "head", lambda self, normed: rows.append(normed.shape[1]) or head(self, normed))
    collect(demo, sequences * 5, (6,), config(calibration_batch=1), 64, "test")
    tokens = 5 * sum(len(s.ids) for s in sequences)
    expected = 2 * 64 * (1 + np.log(tokens / 64))  # two heads; the expected number of tokens that enter the reservoir
    assert sum(rows) < 1.3 * expected < tokens


def test_nan_in_a_hidden_state(sequences, demo):
    broken = wrap_model(copy.deepcopy(demo.model), "broken")
    broken.anatomy.layers[4].register_forward_hook(
        lambda module, args, output: (output[0] * float("nan"),) if isinstance(output, tuple) else output * float("nan")
    )
    with pytest.raises(CalibrationError, match="'broken' gives NaN or infinity in its hidden state after layer 9"):
        collect(broken, sequences, CHECKPOINTS, config(), 100, "test")


def test_tokenizer_of_another_model(demo):
    with pytest.raises(CalibrationError, match="token id 4096"):
        collect(demo, [TokenSequence(0, [1, 4096])], CHECKPOINTS, config(), 100, "test")
