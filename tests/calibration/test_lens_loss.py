"""The loss of lenses over a part of the vocabulary is near the whole one's, whatever the head is."""

import pytest
import torch

from tide_export.calibration import lens_loss
from tide_export.calibration.lens_loss import PartialHead, fast_dtype


@pytest.fixture(scope="module")
def states(demo, sequences):
    """Normalized states after 6 and after all layers, of some hundred tokens."""
    raw = [demo.raw_hidden(torch.from_numpy(s.ids)[None].long(), [6, 12]) for s in sequences[:8]]
    return tuple(demo.normalize(torch.cat([states[layers][0] for states in raw])) for layers in (6, 12))


def exact(demo, exits, full):
    """KL divergence of the whole distributions, as the formula is written."""
    target, found = (demo.head(part[None])[0].log_softmax(-1) for part in (full, exits))
    return float((target.exp() * (target - found)).sum(-1).mean())


def partial(demo, exits, full, seed=0):
    """The same with gradients for the exits."""
    exits = exits.clone().requires_grad_()
    target = PartialHead(demo).target(full, torch.Generator().manual_seed(seed))
    loss = target.loss(exits)
    (gradient,) = torch.autograd.grad(loss, exits)
    return target, float(loss.detach()), gradient


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(lens_loss, "fast_dtype", lambda device: None)


def test_of_a_small_vocabulary_it_is_the_divergence(demo, states):
    _, loss, _ = partial(demo, *states)
    assert loss == pytest.approx(exact(demo, *states), rel=1e-4)


def test_the_sample_stands_for_the_rest(demo, states, monkeypatch):
    _, whole, gradient = partial(demo, *states)
    monkeypatch.setattr(lens_loss, "WHOLE_VOCABULARY", 16)
    monkeypatch.setattr(lens_loss, "SAMPLED_TOKENS", 1024)
    monkeypatch.setattr(lens_loss, "SIZE_STEP", 100)
    monkeypatch.setattr(lens_loss, "MARGIN", 1.0)
    target, _, _ = partial(demo, *states)
    assert 1024 <= target.probabilities.shape[1] < 0.5 * demo.vocab_size
    assert target.probabilities.shape[1] % 100 == 0
    losses, gradients = zip(*[partial(demo, *states, seed)[1:] for seed in range(4)], strict=True)
    assert sum(losses) / 4 == pytest.approx(whole, rel=0.05)
    mean = torch.stack(gradients).mean(0)
    assert float(torch.cosine_similarity(mean.flatten(), gradient.flatten(), dim=0)) > 0.97


def test_a_head_that_is_no_product_gives_the_same(demo, states, monkeypatch):
    monkeypatch.setattr(lens_loss, "WHOLE_VOCABULARY", 16)
    _, loss, gradient = partial(demo, *states)
    monkeypatch.setattr(type(demo), "head_rows", lambda self: None)
    _, slow, same = partial(demo, *states)
    assert slow == pytest.approx(loss, rel=1e-4)
    assert torch.allclose(gradient, same, atol=1e-5)


def test_a_scaled_head_is_not_taken_for_a_product(demo, monkeypatch):
    assert PartialHead(demo)._rows is not None
    head = type(demo).head
    monkeypatch.setattr(type(demo), "head", lambda self, normalized: 0.5 * head(self, normalized))
    assert PartialHead(demo)._rows is None


@pytest.mark.parametrize(("seconds", "dtype"), [(0.5, torch.bfloat16), (0.9, None), (2.0, None)])
def test_bfloat16_only_where_its_products_are_faster(monkeypatch, seconds, dtype):
    fast_dtype.cache_clear()
    monkeypatch.setattr(lens_loss, "product_seconds", lambda kind: seconds if kind is torch.bfloat16 else 1.0)
    assert fast_dtype(torch.device("cpu")) is dtype
    fast_dtype.cache_clear()


def test_a_product_takes_time():
    assert 0 < lens_loss.product_seconds(torch.float32) < 1
