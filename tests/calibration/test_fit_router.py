"""Fitting: learns what can be learnt, keeps the best epoch, repeats exactly, and reports the truth."""

import math

import pytest
import torch

from tide_export.calibration import fit_router as fit
from tide_export.calibration.config import TideConfig
from tide_export.calibration.fit_router import LabelledHidden, assess, fit_router
from tide_export.errors import CalibrationError
from tide_export.routers.router import Router


def config(**options):
    return TideConfig.from_options(router_bottleneck_dim=16, **options)


def toy(tokens, seed, scale=1.0, noise=0.0):
    """States of width 8 whose label is the sign of x0 * x1; `noise` is the share of labels drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 8, generator=generator)
    y = x[:, 0] * x[:, 1] > 0
    lots = torch.rand(tokens, generator=generator) < noise
    y = torch.where(lots, torch.rand(tokens, generator=generator) < 0.5, y)
    return LabelledHidden(x * scale, y)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_learns_a_separable_problem_at_any_scale(scale):
    fitted = fit_router(
        toy(6000, 0, scale), toy(1500, 1, scale), config(router_learning_rate=1e-2, router_epochs=40), 4
    )
    assert fitted.report["accuracy"] > 0.95
    assert fitted.report["precision"] > 0.98
    assert fitted.report["loss"] < 0.2 < fitted.report["base_loss"]


def test_scores_are_probabilities():
    """Half the labels are drawn by lot: honest scores lie in .25 to .75, and their mean is the positive rate."""
    fitted = fit_router(toy(20000, 0, noise=0.5), toy(5000, 1, noise=0.5), config(router_learning_rate=1e-2), 4)
    scores = fitted.router(toy(5000, 2).features)
    assert 0.2 < scores.quantile(0.1) < 0.4
    assert 0.6 < scores.quantile(0.9) < 0.8
    assert abs(fitted.report["mean_score"] - fitted.report["positive_rate"]) < 0.03
    assert fitted.report["exit_rate"] < 0.05


def test_best_epoch_is_restored(monkeypatch):
    """On few and noisy tokens the router overfits; what is kept are the weights of the lowest loss, not the last."""
    losses, weights, loss_of = [], [], fit._loss

    def watched(router, *args):
        losses.append(loss_of(router, *args))
        weights.append(router.down.weight.detach().clone())
        return losses[-1]

    monkeypatch.setattr(fit, "_loss", watched)
    train, validation = toy(300, 0, noise=0.5), toy(300, 1, noise=0.5)
    fitted = fit_router(train, validation, config(router_epochs=40, router_learning_rate=3e-2), 4)
    best = fitted.report["best_epoch"]
    assert best < fitted.report["epochs"] == len(losses) < 40
    assert losses[best - 1] == min(losses) < losses[-1]
    size = float(train.features.square().mean().sqrt())
    assert torch.allclose(fitted.router.down.weight, weights[best - 1] / size)
    assert not torch.allclose(fitted.router.down.weight, weights[-1] / size)
    # Scaling the scores is fitted to the same tokens, so it can only lower the loss there.
    assert fitted.report["loss"] == pytest.approx(assess(fitted.router, validation, 0.85)["loss"])
    assert fitted.report["loss"] <= min(losses) + 1e-6


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
    train, validation = (
        LabelledHidden(toy(n, seed).features, torch.full((n,), truth)) for n, seed in ((30000, 0), (1000, 1))
    )
    report = fit_router(train, validation, config(router_learning_rate=1e-2), 4).report
    assert report["positive_rate"] == truth
    assert abs(report["mean_score"] - truth) < 0.02
    assert abs(report["exit_rate"] - truth) < 0.02
    assert report["precision"] == (1.0 if truth else None)
    assert report["recall"] == (pytest.approx(1.0, abs=0.02) if truth else None)
    assert report["base_loss"] == 0.0
    assert report["ece"] == report["ece_before_scaling"]  # no scaling is fitted to one class


def test_report_against_a_count_by_hand():
    router = Router(1, 1)
    with torch.no_grad():
        router.down.weight.fill_(1.0)
        router.up.weight.fill_(1.0)
    x = torch.tensor([[4.0], [3.0], [1.0], [-0.5], [2.9]])  # scores .98 .95 .68 .45 .94
    report = assess(router, LabelledHidden(x, torch.tensor([True, True, False, True, False])), threshold=0.85)
    assert report["tokens"] == 5
    assert report["positive_rate"] == pytest.approx(0.6)
    assert report["exit_rate"] == pytest.approx(0.6)
    assert report["precision"] == pytest.approx(2 / 3)
    assert report["recall"] == pytest.approx(2 / 3)
    assert report["accuracy"] == pytest.approx(2 / 5)
    assert report["base_loss"] == pytest.approx(-0.6 * math.log(0.6) - 0.4 * math.log(0.4), abs=1e-5)


def test_loss_that_is_no_number():
    known = toy(200, 0)
    broken = LabelledHidden(known.features * float("inf"), known.labels)
    with pytest.raises(CalibrationError, match="checkpoint 4 cannot be fitted"):
        fit_router(broken, known, config(), 4)


# --- the scores: Platt scaling -----------------------------------------------------------------------------------


def line_router(factor: float, shift: float) -> Router:
    """A router of one input whose logit is close to factor * x + shift for the x of `line`, which are large."""
    router = Router(1, 2)
    with torch.no_grad():
        router.down.weight.copy_(torch.tensor([[1.0], [-1.0]]))  # silu(x) - silu(-x) = x
        router.up.weight.copy_(torch.tensor([[factor, -factor]]))
        router.up.bias.fill_(shift)
    return router.requires_grad_(False)


def line(tokens: int, seed: int) -> LabelledHidden:
    """States of one number x that may leave with probability sigmoid(x - 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(tokens, 1, generator=generator)
    return LabelledHidden(x, torch.rand(tokens, generator=generator) < torch.sigmoid(x[:, 0] - 1))


@pytest.mark.parametrize(("factor", "shift"), [(8.0, 3.0), (0.05, 0.0), (1.0, -6.0)])
def test_scores_out_of_scale_become_probabilities(factor, shift):
    router, held_out = line_router(factor, shift), line(20000, 1)
    before = assess(router, held_out, 0.85)
    fit._platt(router, line(20000, 0))
    after = assess(router, held_out, 0.85)
    assert before["ece"] > 0.1
    assert after["ece"] < 0.015
    assert after["loss"] < before["loss"]
    logit = router.logit(torch.tensor([[0.0], [4.0]]))
    assert logit.tolist() == pytest.approx([-1.0, 3.0], abs=0.15)


@pytest.mark.parametrize("truth", [False, True])
def test_scaling_leaves_a_router_alone_that_saw_one_class(truth):
    router = line_router(2.0, 1.0)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    fit._platt(router, LabelledHidden(line(500, 0).features, torch.full((500,), truth)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in router.state_dict().items())


def test_scaling_never_turns_a_router_round():
    """Where the scores are worse than none, every token gets the share that may leave, which at least is so."""
    router, known = line_router(1.0, 0.0), line(5000, 0)
    turned = LabelledHidden(known.features, ~known.labels)
    fit._platt(router, turned)
    assert torch.allclose(router(turned.features), turned.labels.float().mean())


def test_fitting_scales_the_scores_and_says_what_it_did():
    """Few steps leave a timid router behind, whose scores all lie nearer the middle than they should."""
    fitted = fit_router(toy(6000, 0), toy(6000, 1), config(router_learning_rate=1e-2), 4)
    assert fitted.report["ece"] < 0.5 * fitted.report["ece_before_scaling"]
    assert assess(fitted.router, toy(6000, 2), 0.85)["ece"] < 0.5 * fitted.report["ece_before_scaling"]


@pytest.mark.filterwarnings("error")
def test_fitting_warns_of_nothing():
    fit_router(toy(500, 0), toy(500, 1), config(router_epochs=1), 4)


# --- class weights and the shortlist -----------------------------------------------------------------------------


def test_class_weights_give_both_classes_half_of_the_loss():
    labels = torch.tensor([1.0] * 5 + [0.0] * 95)
    weights = fit._class_weights(labels)
    assert float(weights.mean()) == pytest.approx(1.0)
    assert float(weights[labels > 0.5].sum()) == pytest.approx(50.0, rel=1e-4)
    assert float(weights[labels < 0.5].sum()) == pytest.approx(50.0, rel=1e-4)


def test_class_balance_changes_the_fit_but_not_what_a_score_means():
    """Weighted, a rare class is believed in too much; the scaling afterwards takes that back."""
    rare = toy(8000, 0, noise=0.5)
    keep = ~rare.labels | (torch.arange(8000) % 10 == 0)
    train, validation = (
        LabelledHidden(rare.features[keep][a:b], rare.labels[keep][a:b]) for a, b in ((0, 3000), (3000, -1))
    )
    reports = [
        fit_router(train, validation, config(class_balance=balance, router_learning_rate=1e-2), 4).report
        for balance in (False, True)
    ]
    assert reports[1]["ece_before_scaling"] > 2 * reports[0]["ece_before_scaling"]
    for report in reports:
        assert report["mean_score"] == pytest.approx(report["positive_rate"], abs=0.01)
        assert report["ece"] < 0.05


def confident(tokens: int, seed: int, scale: float) -> LabelledHidden:
    """States whose label is how far the best of 12 logits is ahead of the second: what a small MLP cannot compute."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 24, generator=generator)
    best = (x @ HEAD.T).topk(2).values
    return LabelledHidden(x * scale, best[:, 0] - best[:, 1] > 2.0)


HEAD = torch.randn(12, 24, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_shortlist_tells_what_the_state_alone_does_not(scale):
    train, validation = confident(6000, 0, scale), confident(2000, 1, scale)
    settings = config(router_epochs=8, router_learning_rate=1e-2)
    without = fit_router(train, validation, settings, 4)
    told = fit_router(train, validation, settings, 4, HEAD)
    assert told.report["loss"] < 0.5 * without.report["loss"]
    assert told.report["accuracy"] > 0.85
    assert told.router.shortlist is not None
    assert torch.equal(told.router.shortlist, HEAD)  # read, never trained
    assert without.router.shortlist is None
