"""Labels against the definitions, written as plain loops over whole Hugging Face outputs."""

import numpy as np
import pytest
import torch

from tide_export.calibration import labels as module
from tide_export.calibration.collect import Sample
from tide_export.calibration.config import TideConfig
from tide_export.calibration.labels import divergence, likeliest, may_exit, normalize, unchanged

CHECKPOINTS = (3, 6, 9)


@pytest.fixture(scope="module")
def states(demo, sequences):
    return demo.run(torch.from_numpy(sequences[0].ids).long()[None], [*CHECKPOINTS, demo.num_layers])


@pytest.fixture(scope="module")
def sample(states):
    raw = {layers: state[0] for layers, state in states.raw.items()}
    nothing = torch.zeros(len(raw[3]), dtype=torch.int64)
    return Sample(raw, nothing, nothing, torch.stack([nothing, nothing], 1), len(nothing))


def labels_of(demo, sample, layers, **options):
    """By `may_exit`, for identity exits."""
    full = likeliest(demo, normalize(demo, sample.raw[demo.num_layers]))
    exits = normalize(demo, sample.raw[layers])
    return may_exit(demo, sample, TideConfig.from_options(**options), layers, exits, full)


def log_probabilities(demo, raw):
    """float64 [n, V], in NumPy."""
    with torch.no_grad():
        logits = demo.model.lm_head(demo.model.model.norm(raw)).double().numpy()
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_unchanged_is_the_checkpoints_own_head_against_the_models_logits(demo, states, sample):
    full = [int(states.logits[0, t].argmax()) for t in range(states.logits.shape[1])]
    for layers in CHECKPOINTS:
        early = demo.head(demo.normalize(states.raw[layers]))[0]
        expected = [int(early[t].argmax()) == full[t] for t in range(len(full))]
        assert labels_of(demo, sample, layers, label="unchanged").tolist() == expected
        assert 0 < sum(expected) < len(expected)


def test_unchanged_is_of_the_exit_and_not_of_the_raw_state(demo, sample):
    """A lens changes what leaves, and with it the label."""
    full = likeliest(demo, normalize(demo, sample.raw[demo.num_layers]))
    exits = normalize(demo, sample.raw[demo.num_layers])  # a lens that knows the last layer
    assert may_exit(demo, sample, TideConfig(), 3, exits, full).all()


def test_unchanged_is_that_of_the_whole_head_whatever_is_asked_first(demo):
    """A few tokens are above the frequent ones, others below them, and some of these are top-1."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(600, demo.normalized_size, generator=generator)
    tokens = likeliest(demo, states)
    tokens[::3] = tokens[torch.randperm(600, generator=generator)][::3]
    found = unchanged(demo, states, tokens)
    assert torch.equal(found, module.predict(demo, states).unchanged(tokens))
    assert 350 < int(found.sum()) < 450


def test_a_head_with_a_cap_is_asked_as_a_whole(demo, sample, monkeypatch):
    plain = demo.structure.head
    monkeypatch.setattr(type(demo.structure), "head", lambda _, *given: 3.0 * torch.tanh(plain(*given) / 3.0))
    assert module.head_matrix(demo) is None
    states = normalize(demo, sample.raw[9])
    assert torch.equal(unchanged(demo, states, likeliest(demo, states)), torch.ones(len(states), dtype=torch.bool))


def test_divergence_is_kl_of_the_full_from_the_exits_distribution(demo, sample):
    last = sample.raw[demo.num_layers]
    full = log_probabilities(demo, last)
    for layers in CHECKPOINTS:
        exits = log_probabilities(demo, sample.raw[layers])
        expected = (np.exp(full) * (full - exits)).sum(axis=1)
        found = divergence(demo, normalize(demo, sample.raw[layers]), normalize(demo, last))
        assert np.allclose(found.numpy(), expected, atol=1e-4)
        bound = float(np.median(expected)) + 1e-3
        labels = labels_of(demo, sample, layers, label="kl", kl_bound=bound)
        assert labels.tolist() == (expected < bound).tolist()
        assert 0 < int(labels.sum()) < len(labels)


def test_unchanged_is_the_same_first_token(demo, sample):
    early, full = normalize(demo, sample.raw[6]), normalize(demo, sample.raw[demo.num_layers])
    said = likeliest(demo, full)
    found = unchanged(demo, early, said)
    assert found.tolist() == (likeliest(demo, early) == said).tolist()
    assert 0 < int(found.sum()) < len(found)
    assert unchanged(demo, full, said).all()


def test_divergence_from_itself_is_zero_and_never_below(demo, sample):
    full = normalize(demo, sample.raw[demo.num_layers])
    found = divergence(demo, full, full)
    assert float(found.min()) >= 0.0
    assert float(found.max()) < 1e-5


def test_chunks_do_not_matter(demo, sample, monkeypatch):
    early, full = normalize(demo, sample.raw[6]), normalize(demo, sample.raw[12])
    whole, distance = likeliest(demo, early), divergence(demo, early, full)
    monkeypatch.setattr(module, "LOGITS_BYTES", 4 * demo.vocab_size * 5)
    assert likeliest(demo, early).tolist() == whole.tolist()
    assert torch.allclose(divergence(demo, early, full), distance, atol=1e-5)


def test_logits_are_bounded_in_memory(demo, states, monkeypatch):
    seen = []
    head = type(demo).head
    monkeypatch.setattr(type(demo), "head", lambda self, states: seen.append(states.shape[1]) or head(self, states))
    monkeypatch.setattr(module, "LOGITS_BYTES", 4 * demo.vocab_size * 5 + 3)
    likeliest(demo, demo.normalize(states.raw[6])[0])
    assert max(seen) == 5


def test_cosine_is_between_raw_states(demo, sample):
    last = sample.raw[demo.num_layers]
    for layers in CHECKPOINTS:
        raw = sample.raw[layers]
        cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(raw, last, strict=True)]
        threshold = sorted(cosines)[len(cosines) // 2] + 1e-4
        labels = labels_of(demo, sample, layers, label="cosine", convergence_threshold=threshold)
        assert labels.tolist() == [cosine > threshold for cosine in cosines]
