"""Labels against the definitions, written as plain loops over whole Hugging Face outputs."""

import pytest
import torch

from tide_export.calibrate import labels as module
from tide_export.calibrate.labels import agreement_labels, cosine_labels, top1

CHECKPOINTS = (3, 6, 9)


@pytest.fixture(scope="module")
def states(demo, sequences):
    return demo.run(torch.tensor([sequences[0].ids]), [*CHECKPOINTS, demo.num_layers])


def test_agreement_is_the_checkpoints_own_head_against_the_models_logits(demo, states):
    full = [int(states.logits[0, t].argmax()) for t in range(states.logits.shape[1])]
    for layers in CHECKPOINTS:
        normed = demo.normed(states.raw[layers])[0]
        early = demo.head(normed[None])[0]
        expected = [int(early[t].argmax()) == full[t] for t in range(len(full))]
        last = demo.normed(states.raw[demo.num_layers])[0]
        assert agreement_labels(demo, normed, top1(demo, last)).tolist() == expected
        assert 0 < sum(expected) < len(expected)


def test_chunks_do_not_matter(demo, states, monkeypatch):
    normed = demo.normed(states.raw[6])[0]
    whole = top1(demo, normed)
    monkeypatch.setattr(module, "LOGITS_BYTES", 4 * demo.vocab_size * 5)
    assert top1(demo, normed).tolist() == whole.tolist()


def test_logits_are_bounded_in_memory(demo, states, monkeypatch):
    seen = []
    head = type(demo).head
    monkeypatch.setattr(type(demo), "head", lambda self, normed: seen.append(normed.shape[1]) or head(self, normed))
    monkeypatch.setattr(module, "LOGITS_BYTES", 4 * demo.vocab_size * 5 + 3)
    top1(demo, demo.normed(states.raw[6])[0])
    assert max(seen) == 5


def test_cosine_is_between_raw_states(demo, states):
    last = states.raw[demo.num_layers][0]
    for layers in CHECKPOINTS:
        raw = states.raw[layers][0]
        cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(raw, last, strict=True)]
        threshold = sorted(cosines)[len(cosines) // 2] + 1e-4
        assert cosine_labels(raw, last, threshold).tolist() == [cosine > threshold for cosine in cosines]
