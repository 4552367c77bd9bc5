"""Calibration through the command line, from end to end on the demo model and a little text."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiers
from command_line import refused

from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.cli.main import _config, main
from tide_export.cli.options import build_parser
from tide_export.errors import ConfigError
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import check_exit

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "demo" / "demo-llama"
TEXT = ROOT / "calibration" / "text" / "python-stdlib.jsonl"
LITTLE = ["--dataset", TEXT, "--calibration-samples", 24, "--calibration-length", 96, "--router-epochs", 2]
LITTLE += ["--lens-tokens", 999]
pytestmark = pytest.mark.usefixtures("unpictured")


def run(*arguments: object) -> int:
    return main([*map(str, arguments), *map(str, LITTLE), "-q"])


def test_checkpoints_and_lenses_of_our_choice_are_exported_and_follow_the_oracle(
    tmp_path: Path, capsys, demo_source, demo_text_ids
) -> None:
    """Everything at once: lenses, shortlist, report, the gate at the end of `export`; in `make test-all` at checkpoints
    that it chooses, for which the model is traced."""
    bundle = tmp_path / "bundle"
    checkpoints, least = tiers.sized(("3,6,9", 3), ("auto", 4))
    options = ["--checkpoints", checkpoints, "--min-layers", least, "--exit-strategy", "lens", "--lens-rank", 16]
    assert run("export", MODEL, "-o", bundle, *options) == 0
    assert capsys.readouterr().out == f"{bundle}\n"
    routers = RouterSet.load(bundle / "routers.safetensors")
    manifest = open_bundle(bundle).manifest
    assert manifest.checkpoints == routers.checkpoints
    assert 1 <= len(routers.checkpoints) <= 6
    assert routers.checkpoints[0] >= least
    assert routers.lenses.keys() >= set(routers.checkpoints) - {3}  # there one is worse than none after little text
    assert any(lens.up.weight.abs().max() > 0 for lens in routers.lenses.values()), "a lens that does something"
    assert routers.routers[routers.checkpoints[0]].shortlist is not None
    assert (bundle / "report.html").is_file()
    assert (bundle / "report.png").is_file()

    off = [1.0] * len(routers.checkpoints)
    scores = oracle(demo_source, routers, demo_text_ids[:90], off).scores.numpy()
    thresholds = np.quantile(scores, 0.7, axis=0).tolist()
    check = check_exit(load(bundle), demo_source, routers, [demo_text_ids[:50]], 30, thresholds)
    assert check.holds, check.differences
    assert len(check.exits) > 1


def test_a_report_is_two_files_beside_the_routers_and_a_cache_stays(tmp_path: Path, capsys) -> None:
    more = ["--cache", tmp_path / "cache"]
    target, report = tmp_path / "r.safetensors", tmp_path / "gains.html"
    assert run("calibrate", MODEL, "-o", target, "--checkpoints", "3,9", "--report", report, *more) == 0
    out, err = capsys.readouterr()
    assert out == f"{target}\n"
    assert err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"r.safetensors", "gains.html", "gains.png", "cache"}
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"train", "validation", "test"}
    assert "<html" in report.read_text()
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    provenance = RouterSet.load(target).provenance
    assert len(provenance["document_hashes"]) == provenance["documents"] > 1
    assert provenance["config"]["checkpoints"] == [3, 9]


def test_what_is_learnt_may_be_chosen(tmp_path: Path) -> None:
    target = tmp_path / "r.safetensors"
    options = ["--label", "kl", "--kl-bound", 0.3, "--router-shortlist", 0, "--class-balance", "yes"]
    assert run("calibrate", MODEL, "-o", target, "--checkpoints", "3,9", *options) == 0
    made = RouterSet.load(target)
    assert made.provenance["label"] == "kl"
    assert made.routers[3].shortlist is None
    config = made.provenance["config"]
    assert (config["kl_bound"], config["class_balance"], config["router_shortlist"]) == (0.3, True, 0)


def test_a_model_without_room_for_a_checkpoint_is_told_in_one_line(tmp_path: Path, capsys) -> None:
    options = ["--checkpoints", "auto", "--min-layers", 12]
    assert run("calibrate", MODEL, "-o", tmp_path / "r.safetensors", *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert "a model of 12 layers has none from layer 12 on: lower --min-layers" in err
    assert list(tmp_path.iterdir()) == []


def test_no_label_to_learn_writes_nothing(tmp_path: Path, capsys) -> None:
    options = ["--checkpoints", "3,9", "--label", "kl", "--kl-bound", 1000, "--report", tmp_path / "r.html"]
    assert run("calibrate", MODEL, "-o", tmp_path / "r.safetensors", *options) == 2
    _, err = capsys.readouterr()
    assert [line for line in err.splitlines() if "error" in line] == err.splitlines()[-1:]
    assert "nothing to learn" in err
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_says_all_this_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('checkpoints = "auto"\nmin_layers = 9\nexit_strategy = "lens"\nlens_rank = 4\n')
    target = tmp_path / "r.safetensors"
    assert run("calibrate", MODEL, "-o", target, "--recipe", recipe) == 0
    made = RouterSet.load(target)
    assert made.checkpoints[0] >= 9
    assert {lens.down.out_features for lens in made.lenses.values()} == {4}
    assert json.loads(json.dumps(made.provenance)) == made.provenance


def test_tides_strategy_for_kv_may_be_exact_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    gone = "propagate is gone, because exact K/V change 2 to 5 points fewer tokens and are as fast"
    recipe, output = tmp_path / "recipe.toml", ["-o", str(tmp_path / "x")]
    for command in ("calibrate", "export"):
        exact = build_parser().parse_args([command, str(MODEL), *output, "--kv-cache-strategy", "exact"])
        assert _config(exact) == TideConfig(kv_cache_strategy="exact") == TideConfig()
        line = refused(capsys, command, MODEL, *output, "--kv-cache-strategy", "propagate")
        assert f"error: option kv_cache_strategy: {gone}: omit the option, or give exact" in line
        assert "must be exact, not 'some'" in refused(capsys, command, MODEL, *output, "--kv-cache-strategy", "some")
        recipe.write_text('kv_cache_strategy = "propagate"\n')
        line = refused(capsys, command, MODEL, *output, "--recipe", recipe)
        assert f"recipe.toml: option kv_cache_strategy: {gone}" in line
        recipe.write_text('kv_cache_strategy = "exact"\nseed = 3\n')
        assert _config(build_parser().parse_args([command, str(MODEL), *output, "--recipe", str(recipe)])).seed == 3
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "kv-cache-strategy" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=gone):
        TideConfig(kv_cache_strategy="propagate")
