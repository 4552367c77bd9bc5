"""Fitting a lens: it starts as nothing, brings the exit nearer to the full model, and is never worse than nothing."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tide_export.calibration.collect import collect
from tide_export.calibration.fit_lens import fit_lens
from tide_export.calibration.labels import divergence, normalize
from tide_export.config import TideConfig
from tide_export.data.sequences import read_sequences
from tide_export.errors import CalibrationError

TEXT = Path(__file__).parents[2] / "calibration" / "text" / "python-stdlib.jsonl"
SETTINGS = {"lens_rank": 16, "lens_epochs": 2, "lens_learning_rate": 1e-3}


def config(**options):
    return TideConfig.from_options(**(SETTINGS | options))


@pytest.fixture(scope="module")
def samples(demo, tokenizer):
    """Some thousand training tokens and about a fifth of that from other documents, after 4 layers and after all."""
    sequences = list(read_sequences(str(TEXT), tokenizer, length=64, limit=76))
    documents = sorted({sequence.document for sequence in sequences})
    held = [s for s in sequences if s.document in documents[-len(documents) // 6 :]]
    known = [s for s in sequences if s not in held]
    return tuple(collect(demo, part, (4, 12), TideConfig(), 10_000, "test") for part in (known, held))


@pytest.fixture(scope="module")
def fitted(demo, samples):
    return fit_lens(demo, *samples, config(), 4)


def kl(demo, lens, sample):
    """Mean divergence of the exits through `lens`, in one go, by the routers' own path."""
    with torch.no_grad():
        states = demo.normalize(lens(sample.raw[4]))
    return float(divergence(demo, states, normalize(demo, sample.raw[12])).mean())


def test_it_starts_as_nothing(demo, samples):
    lens, record = fit_lens(demo, *samples, config(lens_learning_rate=1e-30), 4)
    raw = samples[1].raw[4]
    assert torch.equal(lens(raw), raw)
    assert record["kl_before"] == pytest.approx(kl(demo, torch.nn.Identity(), samples[1]), rel=1e-4)


def test_the_divergence_falls_on_text_it_was_not_fitted_to(demo, samples, fitted):
    lens, record = fitted
    assert record["kl_after"] < 0.95 * record["kl_before"]
    assert 1 <= record["best_epoch"] <= 2
    assert record["rank"] == 16 == lens.down.out_features


def test_what_is_returned_is_what_was_trained(demo, samples, fitted):
    """Trained on states of unit size, applied to raw ones: the size is folded into the bias and nowhere else."""
    lens, record = fitted
    assert not 0.5 < float(samples[0].raw[4].square().mean().sqrt()) < 2  # or folding would hardly show
    assert float(lens.up.bias.abs().max()) > 0
    assert kl(demo, lens, samples[1]) == pytest.approx(record["kl_after"], rel=1e-4)


def test_never_worse_than_nothing(demo, samples):
    lens, record = fit_lens(demo, *samples, config(lens_learning_rate=3.0, lens_epochs=1), 4)
    assert record["best_epoch"] == 0
    assert record["kl_after"] == record["kl_before"]
    raw = samples[1].raw[4]
    assert torch.equal(lens(raw), raw)


def test_the_same_again_whatever_the_global_generator(demo, samples, fitted):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again, record = fit_lens(demo, *samples, config(), 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert record == fitted[1]
    assert all(torch.equal(t, fitted[0].state_dict()[name]) for name, t in again.state_dict().items())
    other, _ = fit_lens(demo, *samples, config(seed=1, lens_epochs=1), 4)
    assert not torch.equal(other.down.weight, again.down.weight)


def test_it_is_frozen_and_the_model_untouched(demo, fitted):
    assert not any(parameter.requires_grad for parameter in fitted[0].parameters())
    assert all(parameter.grad is None for parameter in demo.model.parameters())


def test_its_rank_is_at_most_half_the_width(demo, samples):
    lens, record = fit_lens(demo, *samples, config(lens_rank=1000, lens_epochs=1, lens_tokens=64), 4)
    assert record["rank"] == lens.down.out_features == 64


def test_loss_that_is_no_number(demo, samples):
    train, validation = samples
    broken = dataclasses.replace(train, raw={4: train.raw[4] * float("nan"), 12: train.raw[12]})
    with pytest.raises(CalibrationError, match="lens at checkpoint 4 cannot be fitted"):
        fit_lens(demo, broken, validation, config(lens_epochs=1), 4)
