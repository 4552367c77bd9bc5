"""Fitting: learns what can be learnt, keeps the best epoch, repeats exactly, and reports the truth."""

import math

import pytest
import torch

from tide_export.calibrate.fit import assess, fit_router
from tide_export.config import TideConfig
from tide_export.errors import CalibrationError
from tide_export.routers import Router


def config(**options):
    return TideConfig.from_options(router_bottleneck_dim=16, **options)


def toy(tokens, seed, scale=1.0, noise=0.0):
    """States of width 8 whose label is the sign of x0 * x1; `noise` is the share of labels drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 8, generator=generator)
    y = x[:, 0] * x[:, 1] > 0
    lots = torch.rand(tokens, generator=generator) < noise
    y = torch.where(lots, torch.rand(tokens, generator=generator) < 0.5, y)
    return x * scale, y


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_learns_a_separable_problem_at_any_scale(scale):
    fitted = fit_router(toy(6000, 0, scale), toy(1500, 1, scale), config(router_learning_rate=1e-2), 4)
    assert fitted.report["accuracy"] > 0.95
    assert fitted.report["precision"] > 0.98
    assert fitted.report["loss"] < 0.2 < fitted.report["base_loss"]


def test_scores_are_probabilities():
    """Half the labels are drawn by lot: honest scores lie in .25 to .75, and their mean is the positive rate."""
    fitted = fit_router(toy(20000, 0, noise=0.5), toy(5000, 1, noise=0.5), config(router_learning_rate=1e-2), 4)
    scores = fitted.router(toy(5000, 2)[0])
    assert 0.2 < scores.quantile(0.1) < 0.4
    assert 0.6 < scores.quantile(0.9) < 0.8
    assert abs(fitted.report["mean_score"] - fitted.report["positive_rate"]) < 0.03
    assert fitted.report["exit_rate"] < 0.05


def test_best_epoch_is_restored():
    """On few and noisy tokens the router overfits; the loss reported is the lowest, not the last."""
    train, validation = toy(300, 0, noise=0.5), toy(300, 1, noise=0.5)
    fitted = fit_router(train, validation, config(router_epochs=40, router_learning_rate=3e-2), 4)
    best = fitted.report["best_epoch"]
    assert best < fitted.report["epochs"] < 40
    assert fitted.report["loss"] == pytest.approx(assess(fitted.router, *validation, 0.85)["loss"])
    stopped = fit_router(train, validation, config(router_epochs=best, router_learning_rate=3e-2), 4)
    assert torch.equal(stopped.router.down.weight, fitted.router.down.weight)


def test_deterministic_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = fit_router(toy(500, 0), toy(100, 1), config(router_epochs=2), 4)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    again = fit_router(toy(500, 0), toy(100, 1), config(router_epochs=2), 4)
    other = fit_router(toy(500, 0), toy(100, 1), config(router_epochs=2, seed=1), 4)
    assert torch.equal(first.router.down.weight, again.router.down.weight)
    assert not torch.equal(first.router.down.weight, other.router.down.weight)


def test_router_is_frozen():
    fitted = fit_router(toy(500, 0), toy(100, 1), config(router_epochs=1), 4)
    assert not any(parameter.requires_grad for parameter in fitted.router.parameters())


@pytest.mark.parametrize("truth", [False, True])
def test_labels_of_one_class(truth):
    train, validation = toy(30000, 0)[0], toy(1000, 1)[0]
    labels = [torch.full((len(x),), truth) for x in (train, validation)]
    report = fit_router((train, labels[0]), (validation, labels[1]), config(router_learning_rate=1e-2), 4).report
    assert report["positive_rate"] == truth
    assert abs(report["mean_score"] - truth) < 0.02
    assert abs(report["exit_rate"] - truth) < 0.02
    assert report["precision"] == (1.0 if truth else None)
    assert report["recall"] == (pytest.approx(1.0, abs=0.02) if truth else None)
    assert report["base_loss"] == 0.0
    assert report["epochs"] < 40


def test_report_against_a_count_by_hand():
    router = Router(1, 1)
    with torch.no_grad():
        router.down.weight.fill_(1.0)
        router.up.weight.fill_(1.0)
    x = torch.tensor([[4.0], [3.0], [1.0], [-0.5], [2.9]])  # scores .98 .95 .68 .45 .94
    report = assess(router, x, torch.tensor([True, True, False, True, False]), threshold=0.85)
    assert report["tokens"] == 5
    assert report["positive_rate"] == pytest.approx(0.6)
    assert report["exit_rate"] == pytest.approx(0.6)
    assert report["precision"] == pytest.approx(2 / 3)
    assert report["recall"] == pytest.approx(2 / 3)
    assert report["accuracy"] == pytest.approx(2 / 5)
    assert report["base_loss"] == pytest.approx(-0.6 * math.log(0.6) - 0.4 * math.log(0.4), abs=1e-5)


def test_loss_that_is_no_number():
    x, y = toy(200, 0)
    with pytest.raises(CalibrationError, match="checkpoint 4 cannot be fitted"):
        fit_router((x * float("inf"), y), (x, y), config(), 4)
