"""Fitting lenses: they start as nothing, bring exits nearer to the full model, and are used only where they gain."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from tide_export.calibration import fit_lenses as module
from tide_export.calibration import lens_snapshot
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.calibration.fit_lenses import fit_lenses
from tide_export.calibration.labels import divergence, likeliest, normalize, unchanged
from tide_export.data.sequences import read_sequences
from tide_export.errors import CalibrationError

pytestmark = pytest.mark.usefixtures("compared_once")
TEXT = Path(__file__).parents[2] / "calibration" / "text" / "python-stdlib.jsonl"
CHECKPOINTS = (4, 8)


def config(**options):
    return TideConfig.from_options(
        **({"lens_rank": 16, "lens_epochs": 1, "exit_strategy": "lens", "calibration_batch": 4} | options)
    )


@pytest.fixture(scope="module")
def text(demo, tokenizer):
    """Sequences of some thousand training tokens, a sample of some of these, so that the model runs again, and a sample
    of a fifth of that from other documents."""
    sequences = list(read_sequences(str(TEXT), tokenizer, length=64, limit=40))
    documents = sorted({sequence.document for sequence in sequences})
    held = [s for s in sequences if s.document in documents[-len(documents) // 6 :]]
    known = [s for s in sequences if s not in held]
    layers = (*CHECKPOINTS, 12)
    train = collect(demo, known, layers, TideConfig(), 100, "train")
    return known, train, collect(demo, held, layers, TideConfig(), 10_000, "test")


@pytest.fixture(scope="module")
def fitted(demo, text):
    return fit_lenses(demo, *text, config(), CHECKPOINTS)


def same(one, other):
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_the_report_is_of_what_is_returned(demo, text, fitted):
    """Fitted to states of unit size, applied to raw ones by the routers' path: the size is folded into the bias."""
    lenses, reports = fitted
    validation = text[2]
    full = normalize(demo, validation.raw[12])
    for layers in CHECKPOINTS:
        report = reports[layers]
        for lens, when in ((None, "before"), (lenses[layers], "after")):
            exits = normalize(demo, validation.raw[layers], lens)
            share = unchanged(demo, exits, likeliest(demo, full)).float().mean()
            assert report[f"kl_{when}"] == pytest.approx(float(divergence(demo, exits, full).mean()), rel=1e-3)
            assert report[f"may_exit_{when}"] == pytest.approx(float(share), abs=2e-3)
        assert not 0.5 < float(validation.raw[layers].square().mean().sqrt()) < 2  # or folding would hardly show


def test_exits_come_nearer_on_text_they_were_not_fitted_to(text, fitted):
    lenses, reports = fitted
    for layers, report in reports.items():
        assert report["used"]
        assert report["kl_after"] < report["kl_before"]
        assert report["may_exit_after"] > report["may_exit_before"]
        assert report["rank"] == lenses[layers].down.out_features == 16
        assert report["tokens"] == sum(len(sequence.ids) for sequence in text[0])
        tokens = report["curve"]["tokens"]
        assert tokens == sorted(set(tokens))
        assert (tokens[0], tokens[-1], len(tokens)) == (0, report["tokens"], 1 + module.MEASUREMENTS)
        assert report["curve"]["kl"][0] == report["kl_before"]


def test_states_that_were_all_kept_are_not_computed_again(demo, text, fitted, monkeypatch):
    """The same batches in float32, where the other way may round to bfloat16."""
    known, some, validation = text
    every = collect(demo, known, (*CHECKPOINTS, 12), TideConfig(), some.seen, "train")
    monkeypatch.setattr(module, "_run", None)
    _, reports = fit_lenses(demo, known, every, validation, config(), CHECKPOINTS)
    for layers, report in reports.items():
        assert report["tokens"] == fitted[1][layers]["tokens"]
        assert report["kl_after"] == pytest.approx(fitted[1][layers]["kl_after"], rel=0.02)


def test_identity_has_none(demo, text):
    assert fit_lenses(demo, *text, config(exit_strategy="identity"), CHECKPOINTS) == ({}, {})


def test_tokens_bound_what_is_read_and_repeated(demo, text):
    text = (text[0][:16], *text[1:])
    _, reports = fit_lenses(demo, *text, config(lens_tokens=200), (4,))
    assert 200 <= reports[4]["tokens"] < 200 + 4 * 64  # whole batches
    whole = sum(len(sequence.ids) for sequence in text[0])
    twice = fit_lenses(demo, *text, config(lens_epochs=2, lens_rank=1000), (4,))[1][4]
    assert (twice["tokens"], twice["rank"]) == (2 * whole, 64)  # half the width at most
    half = whole + whole // 2
    part = fit_lenses(demo, *text, config(lens_epochs=2, lens_tokens=half, calibration_batch=1), (4,))[1][4]
    assert half <= part["tokens"] < 2 * whole


def test_they_are_frozen_and_the_model_untouched(demo, fitted):
    assert not any(parameter.requires_grad for lens in fitted[0].values() for parameter in lens.parameters())
    assert all(parameter.grad is None for parameter in demo.model.parameters())


def test_one_that_gets_worse_is_not_used_and_said(demo, text, caplog):
    lenses, reports = fit_lenses(demo, *text, config(lens_learning_rate=3.0, lens_tokens=500), (4,))
    assert lenses == {}
    assert (reports[4]["used"], reports[4]["reason"]) == (False, "is worse than none")
    assert reports[4]["kl_after"] == reports[4]["kl_before"]
    assert (
        "the lens at checkpoint 4 is worse than none on held-out text: hidden states exit unchanged there"
        in caplog.text
    )


def test_one_that_diverges_is_not_used_and_said_while_the_others_go_on(demo, text, caplog, monkeypatch):
    def update(fit, loss, rate):
        if fit.size == size:
            fit.lens.up.weight.data.fill_(float("nan"))
        else:
            plain(fit, loss, rate)

    size = float(text[2].raw[4].square().mean().sqrt())
    plain = module.update
    monkeypatch.setattr(module, "update", update)
    lenses, reports = fit_lenses(demo, *text, config(lens_tokens=500), CHECKPOINTS)
    assert set(lenses) == {8}
    assert (reports[4]["used"], reports[4]["reason"]) == (False, "diverges")
    assert "the lens at checkpoint 4 diverges (its loss is not a number)" in caplog.text


def test_auto_uses_one_only_where_it_saves_more_than_it_costs(demo, text, fitted, monkeypatch, caplog):
    """A lens of rank 16 costs a fiftieth of a layer of this model; the early checkpoint has eight layers to save."""
    with caplog.at_level(logging.INFO, logger="tide_export"):
        lenses, reports = fit_lenses(demo, *text, config(exit_strategy="auto"), CHECKPOINTS)
    assert same(lenses[4], fitted[0][4])
    assert "lenses are used at 4, 8: held-out tokens that may exit there" in caplog.text
    dear = dataclasses.replace(module.count_costs(demo, config()), lens=1e12)
    monkeypatch.setattr(module, "count_costs", lambda *_: dear)
    with caplog.at_level(logging.INFO, logger="tide_export"):
        lenses, reports = fit_lenses(demo, *text, config(exit_strategy="auto"), CHECKPOINTS)
    assert lenses == {}
    assert {report["reason"] for report in reports.values()} == {module.COSTS_MORE}
    assert reports[4]["tokens"] < 0.6 * fitted[1][4]["tokens"]  # given up early
    assert "exits use the model's own hidden states" in caplog.text


def test_a_killed_run_resumes_to_the_same_lenses_whatever_the_global_generator(
    demo, text, fitted, tmp_path, monkeypatch
):
    monkeypatch.setattr(lens_snapshot, "SAVE_SECONDS", 0.0)
    passes = []
    run = type(demo).raw_hidden

    def dies(*arguments):
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return run(*arguments)

    torch.manual_seed(99)
    before = torch.get_rng_state()
    monkeypatch.setattr(type(demo), "raw_hidden", dies)
    with pytest.raises(KeyboardInterrupt):
        fit_lenses(demo, *text, config(), CHECKPOINTS, tmp_path)
    lenses, reports = fit_lenses(demo, *text, config(), CHECKPOINTS, tmp_path)
    total = len(passes) - 1
    assert torch.equal(torch.get_rng_state(), before)
    assert reports == fitted[1]
    assert all(same(lenses[layers], fitted[0][layers]) for layers in CHECKPOINTS)
    again, _ = fit_lenses(demo, *text, config(), CHECKPOINTS, tmp_path)  # complete: only read
    assert len(passes) - 1 == total
    assert same(again[4], lenses[4])


def test_a_damaged_file_of_lenses_is_refused(demo, text, tmp_path):
    small = config(lens_tokens=100)
    fit_lenses(demo, *text, small, (4,), tmp_path)
    (file,) = (tmp_path / "lenses").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CalibrationError, match=r"lenses is damaged .*delete it or use another"):
        fit_lenses(demo, *text, small, (4,), tmp_path)
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    with pytest.raises(CalibrationError, match="cannot write the calibration folder"):
        fit_lenses(demo, *text, small, (4,), tmp_path)
