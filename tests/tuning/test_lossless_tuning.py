"""`tide-export tune --mode lossless` end to end: what it stores, what it says, and when it leaves drafting off."""

import json
import shutil
from pathlib import Path

import pytest

import tide_export
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import TuneError
from tide_export.tuning import auto, lossless
from tide_export.tuning.replay import Setting, StepCosts
from tide_export.tuning.request import LosslessRequest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"
QUICK = [
    *("--mode", "lossless", "--dataset", str(TEXT), "--prompts", "6", "--prompt-length", "16"),
    *("--new-tokens", "20", "--threads", "1", "-q"),
]
CHEAP = StepCosts((0.01, 0.02, 0.03), {1: 1.0, 13: 1.1}, {1: 1.0, 28: 1.3}, 1.0)  # drafting costs nothing
DEAR = StepCosts((1.0, 1.0, 1.0), {1: 1.0, 13: 13.0}, {1: 1.0, 28: 28.0}, 1.0)


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path / "copy"))


def test_what_pays_is_stored_and_used(capsys, bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr(lossless, "step_costs", lambda engine, ids: CHEAP)
    for module, limit in ((lossless, "MIN_SPEEDUP"), (auto, "PAYS")):
        monkeypatch.setattr(module, limit, 0.0)  # times are noise here; what they decide is tested below
    assert main(["tune", str(bundle), *QUICK, "--slots", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    drafting = open_bundle(bundle).manifest.drafting
    assert drafting is not None
    assert said["pays"] is said["stored"] is True
    assert drafting.thresholds == tuple(said["drafting"]["thresholds"])
    assert min(drafting.thresholds) < 1.0
    assert drafting.max_drafts == said["tried_max_drafts"] > 0
    assert drafting.tuning["dataset_sha256"] == said["dataset_sha256"]
    assert said["expected_speedup"] > 1.0
    engine = tide_export.load(bundle, threads=1)
    ids = [5, 17, 3, 17, 3]  # text that varies, so that some tokens exit
    out = engine.generate(ids, max_new_tokens=40, mode="lossless", stop_token_ids=[])
    assert out.tokens == engine.generate(ids, max_new_tokens=40, mode="full", stop_token_ids=[]).tokens
    assert out.stats.drafted
    assert (engine.auto.mode, engine.auto.slots, list(engine.auto.evidence["slots"])) == ("lossless", 2, ["2"])
    (auto_mode,) = engine.generate([ids], max_new_tokens=40, stop_token_ids=[])
    assert (auto_mode.tokens, auto_mode.stats.drafted > 0) == (out.tokens, True)
    # Quality is not touched: exit mode's thresholds are what they were.
    assert engine.manifest.thresholds == open_bundle(bundle).manifest.thresholds


def test_what_does_not_pay_is_stored_as_off_and_said(capsys, bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr(lossless, "step_costs", lambda engine, ids: DEAR)
    assert main(["tune", str(bundle), *QUICK]) == 0
    said = capsys.readouterr().out
    assert "no setting is expected to be faster" in said
    assert "DOES NOT PAY" in said
    drafting = open_bundle(bundle).manifest.drafting
    assert drafting is not None
    assert set(drafting.thresholds) == {1.0}
    assert (drafting.max_drafts, drafting.prompt_lookup) == (0, 0)
    assert not tide_export.load(bundle).generate([50, 60], max_new_tokens=20, mode="lossless").stats.drafted


def test_expected_but_not_measured_does_not_pay(capsys, bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr(lossless, "step_costs", lambda engine, ids: CHEAP)
    monkeypatch.setattr(lossless, "MIN_SPEEDUP", 1e9)
    before = open_bundle(bundle).manifest
    assert main(["tune", str(bundle), *QUICK, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "measured on" in said
    assert "DOES NOT PAY" in said
    assert "dry run" in said
    assert open_bundle(bundle).manifest == before


def test_another_token_than_full_depth_s_is_an_error(demo_bundle: Path, monkeypatch) -> None:
    engine = tide_export.load(demo_bundle, threads=1)
    drafting = engine.drafting_as(Setting((0.5,) * 3, 4, 0, 2.0).drafting())
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda prompt, **options: generate(prompt[1:], **options))
    request = LosslessRequest(dataset="", prompts=2, new_tokens=8, temperature=0)
    with pytest.raises(TuneError, match=r"another token than full depth at position \d after prompt 0"):
        lossless.compare(engine, drafting, [[50, 60, 70]], request)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "mode exit needs epsilon, a share of changed tokens, and delta"),
        (("--epsilon", "0.1"), "mode exit needs epsilon, a share of changed tokens, and delta"),
        (("--epsilon", "0.1", "--delta", "0.1", "--new-tokens", "9"), "new_tokens belongs to mode lossless"),
        (("--mode", "lossless", "--epsilon", "0.1"), "epsilon belongs to mode exit"),
        (("--mode", "lossless", "--positions", "3"), "positions belongs to mode exit"),
        (("--mode", "lossless", "--new-tokens", "1"), "new_tokens must be a whole number, 2 or more, not 1"),
        (("--mode", "lossless", "--temperature", "-1"), "temperature must be a finite number, 0 or more, not -1.0"),
        (("--mode", "lossless", "--prompts", "1"), "prompts must be a whole number, 2 or more, not 1"),
        (("--mode", "lossless", "--prompt-length", "2000"), "make 2064 tokens but the model's context holds 1024"),
    ],
)
def test_what_cannot_be_is_one_sentence(capsys, demo_bundle: Path, options: tuple[str, ...], message: str) -> None:
    assert main(["tune", str(demo_bundle), "--dataset", str(TEXT), "-q", *options]) == 2
    assert message in capsys.readouterr().err
