"""`tide-export tune` end to end on the demo bundle: what it stores, what it refuses, and that it never half stores."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tide_export
from tide_export.bundle.auto_mode import sentence
from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import ConfigError, TuneError
from tide_export.runtime.engine import Engine
from tide_export.thresholds.pareto import Point
from tide_export.tuning.measure import Measurement, measure_prompts
from tide_export.tuning.tune import tune as tune_bundle

ROOT = Path(__file__).parents[2]
SEEN = ROOT / "calibration" / "text" / "python-stdlib.jsonl"  # what the demo bundle's routers were fitted on
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"
QUICK = [
    "--prompts",
    "36",
    "--prompts-per-document",
    "4",
    "--prompt-length",
    "12",
    "--positions",
    "8",
    "--threads",
    "1",
    "--temperature",
    "0",
    "--perplexity-epsilon",
    "9",
]


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def _measured_once(measurements: dict[Any, Measurement], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts on copies of one bundle are measured once, and the mode that is fastest is measured briefly."""

    def measure(engine: Engine, prompts: list[list[int]], length: int, checkpoints: list[int], *how: Any) -> Any:
        key = length, *checkpoints, *how[1:], *map(tuple, prompts)
        if key not in measurements:
            measurements[key] = measure_prompts(engine, prompts, length, checkpoints, *how)
        return measurements[key]

    monkeypatch.setattr("tide_export.tuning.exits.measure_prompts", measure)
    for name, value in (("NEW_TOKENS", 8), ("ROUNDS", 2), ("STEADY_SECONDS", 0.0)):
        monkeypatch.setattr(f"tide_export.tuning.auto.{name}", value)


@pytest.fixture(scope="module")
def measurements() -> dict[Any, Measurement]:
    return {}


def tune(capsys, bundle: Path, *options: object, dataset: Path = TEXT, epsilon=0.35, delta=0.2) -> dict:
    """The JSON that `tune` prints."""
    fixed = ["--dataset", dataset, "--epsilon", epsilon, "--delta", delta, "--json", "-q"]
    assert main([str(word) for word in ["tune", bundle, *fixed, *QUICK, *options]]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, bundle: Path, *options: object, dataset: Path = TEXT, epsilon=0.35, delta=0.2) -> str:
    """The one line on stderr of a `tune` that must fail and leave the bundle as it was."""
    before = written(bundle)
    fixed = ["--dataset", dataset, "--epsilon", epsilon, "--delta", delta, "-q"]
    assert main([str(word) for word in ["tune", bundle, *fixed, *QUICK, *options]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if "error: " in line]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert written(bundle) == before
    return lines[0]


def written(folder: Path) -> dict[str, tuple[int, ...]]:
    """What differs where a file was written: its number, time and size."""
    files = {str(file.relative_to(folder)): file.stat() for file in folder.rglob("*") if file.is_file()}
    return {name: (file.st_ino, file.st_mtime_ns, file.st_size) for name, file in files.items()}


def edit(bundle: Path, **changes: object) -> None:
    """Sets fields of tide.json."""
    file = bundle / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        pytest.fail("the graph was run")

    monkeypatch.setattr("tide_export.tuning.exits.measure_prompts", fail)


# --- what it stores --------------------------------------------------------------------------------------------------


def test_what_is_certified_is_stored_and_used_from_then_on(bundle: Path, capsys, demo_text_ids):
    before, others = open_bundle(bundle).manifest, written(bundle)
    report = tune(capsys, bundle)
    manifest = open_bundle(bundle).manifest
    assert report["certified"]
    assert report["stored"]
    last = [tested for tested in report["path"] if tested["passed"]][-1]
    assert list(manifest.thresholds) == last["thresholds"] == report["thresholds"]
    assert manifest.thresholds != before.thresholds
    assert manifest.min_layers == before.min_layers == report["min_layers"]
    assert manifest.tuning is not None
    assert manifest.tuning == {key: report[key] for key in manifest.tuning}
    assert (report["risk"], report["p_value"]) == (last["risk"], last["p_value"])
    assert report["p_value"] <= 0.2
    assert report["layers_per_token"] < 12
    assert report["n"] + report["path_prompts"] == 36
    assert report["documents"] + report["path_documents"] == 10

    changed = {name for name, file in written(bundle).items() if file != others[name]}
    assert changed == {MANIFEST_FILE}
    tuned = dict.fromkeys(("thresholds", "tuning", "auto"))
    assert vars(manifest) | tuned == vars(before) | tuned
    assert manifest.auto is not None
    assert (manifest.auto.thresholds, manifest.auto.epsilon) == (manifest.thresholds, 0.35)
    assert manifest.auto.exit_speedup == report["auto"]["exit_speedup"]

    engine = tide_export.load(bundle, threads=1)
    by_default = engine.generate(demo_text_ids[:20], max_new_tokens=24, mode="exit")
    assert (
        by_default.stats.exit_layer
        == engine.generate(demo_text_ids[:20], max_new_tokens=24, threshold=report["thresholds"]).stats.exit_layer
    )
    assert engine.generate(demo_text_ids[:20], max_new_tokens=24, threshold=0.0).stats.exit_layer == [3] * 24
    overridden = engine.generate(demo_text_ids[:20], max_new_tokens=24, threshold=1.0)
    assert overridden.stats.exit_layer == [12] * 24
    assert by_default.stats.exit_layer != overridden.stats.exit_layer


def test_the_stored_risk_is_what_running_the_bundle_shows(bundle: Path, capsys, monkeypatch):
    """The prompts it tested, run again under the bundle's own defaults."""
    from tide_export.tuning import tune as tuning

    drawn = []
    draw = tuning.draw_prompts
    monkeypatch.setattr(tuning, "draw_prompts", lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1])
    report = tune(capsys, bundle)
    engine = tide_export.load(bundle, threads=1)
    differing, layers = [], []
    for ids in drawn[0].calibration:
        for end in range(report["prompt_length"], len(ids) + 1):
            mine, full = (engine.generate(ids[:end], max_new_tokens=1, mode=mode) for mode in ("exit", "full"))
            differing.append(mine.tokens != full.tokens)
            layers += mine.stats.exit_layer
    assert np.mean(differing) == pytest.approx(report["risk"], abs=1 / len(differing))
    assert np.mean(layers) == pytest.approx(report["layers_per_token"], abs=9 / len(differing))


def test_inspect_and_validate_know_it(bundle: Path, demo_model: Path, capsys):
    assert main(["inspect", str(bundle)]) == 0
    assert "without a guarantee" in capsys.readouterr().out
    report = tune(capsys, bundle)
    assert main(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    for words in ("certified by `tune`", "epsilon: 0.35", "p_value: ", "betting", "candidate"):
        assert words in out
    assert main(["inspect", str(bundle), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["tuning"] == open_bundle(bundle).manifest.tuning
    assert described["tuning_in_force"]

    options = ["--prompts", "2", "--new-tokens", "4", "--longest-prompt", "8", "--threshold", "0.5", "--json", "-q"]
    assert main(["validate", str(bundle), "--model", str(demo_model), *options, "--dataset", str(TEXT)]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["thresholds"] for check in checks if check["name"] == "bundle"] == [report["thresholds"]]

    edit(bundle, thresholds=[0.5, 0.5, 0.5])
    assert main(["inspect", str(bundle)]) == 0
    assert "NOT those that `tune` certified" in capsys.readouterr().out


def test_the_table_says_what_was_tested_and_promised(bundle: Path, capsys):
    options = ["--dataset", str(TEXT), "--epsilon", "0.35", "--delta", "0.2", "--dry-run", "-q"]
    before = written(bundle)
    assert main(["tune", str(bundle), *options, *QUICK]) == 0
    out = capsys.readouterr().out
    assert written(bundle) == before
    for words in (
        "threshold@3",
        "changed, path",
        "perplexity",
        "layers/token",
        "passed",
        "CERTIFIED: thresholds",
        "dry run",
    ):
        assert words in out
    assert "up to 4 prompts from each" in out
    assert "stored" not in out


def test_a_dry_run_finds_the_same_and_stores_nothing(bundle: Path, capsys):
    before = written(bundle)
    dry = tune(capsys, bundle, "--dry-run")
    assert written(bundle) == before
    wet = tune(capsys, bundle)
    assert (dry["stored"], wet["stored"]) == (False, True)
    varying = dict.fromkeys(("stored", "date", "auto"))
    assert dry | varying == wet | varying
    assert dry["auto"]["thresholds"] == wet["auto"]["thresholds"]


def test_min_layers_is_obeyed_and_stored(bundle: Path, capsys):
    report = tune(capsys, bundle, "--min-layers", 6)
    manifest = open_bundle(bundle).manifest
    assert manifest.min_layers == 6
    assert manifest.thresholds[0] == 1.0
    assert all(len(tested["thresholds"]) == 2 for tested in report["path"])
    assert list(manifest.thresholds[1:]) == [t for t in report["path"] if t["passed"]][-1]["thresholds"]


def test_one_position_of_each_document_makes_the_test_exact(bundle: Path, capsys):
    assert tune(capsys, bundle, "--positions", 1, "--dry-run")["p_value_kind"] == "betting"
    report = tune(capsys, bundle, "--positions", 1, "--prompts-per-document", 1)
    assert report["p_value_kind"] == "binomial"
    assert report["n"] == report["documents"] == 7
    assert report["risk"] == pytest.approx(round(report["risk"] * report["n"]) / report["n"])


def test_perplexity_is_bounded_too_and_auto_says_both(bundle: Path, capsys):
    report = tune(capsys, bundle, "--temperature", 0.8)
    evidence = open_bundle(bundle).manifest.auto.evidence
    assert {"changed", "changed_error", "perplexity", "perplexity_error", "tokens"} <= evidence.keys()
    assert (evidence["changed"], evidence["perplexity"]) == (report["risk"], report["perplexity"])
    assert (report["temperature"], evidence["temperature"], evidence["perplexity_epsilon"]) == (0.8, 0.8, 9.0)
    exits = replace(open_bundle(bundle).manifest.auto, mode="exit", exit_speedup=1.5)
    assert re.search(
        r"with \d+\.\d\d ± \d+\.\d\d % changed tokens \(at most 35 %\) and perplexity \+\d+\.\d\d ± \d+\.\d\d % "
        r"\(at most \+900 %\) on 200 tokens that the thresholds were not chosen on, temperature 0\.8",
        sentence(exits),
    )
    strict = tune(capsys, bundle, "--temperature", 0.8, "--perplexity-epsilon", report["perplexity"] / 4)
    assert strict["layers_per_token"] > report["layers_per_token"]
    assert strict["perplexity"] + strict["perplexity_error"] <= report["perplexity"] / 4
    failed = strict["path"][len([one for one in strict["path"] if one["passed"]])]
    assert failed["change"]["perplexity"] + failed["change"]["perplexity_error"] > report["perplexity"] / 4


def test_a_bundle_can_be_tuned_again(bundle: Path, capsys):
    tune(capsys, bundle)
    strict = tune(capsys, bundle, epsilon=0.15, delta=0.3)
    manifest = open_bundle(bundle).manifest
    assert manifest.tuning is not None
    assert manifest.tuning["epsilon"] == 0.15
    assert list(manifest.thresholds) == strict["thresholds"]


def test_when_nothing_passes_nothing_exits_and_it_says_so(bundle: Path, capsys, monkeypatch, demo_text_ids):
    reckless = [Point((0.0, 0.0, 0.0), 0.5, 3.0)]
    monkeypatch.setattr("tide_export.tuning.exits.candidates", lambda path, epsilon: reckless)
    options = ["--dataset", str(TEXT), "--epsilon", "0.1", "--delta", "0.1", "-q", *QUICK]
    assert main(["tune", str(bundle), *options]) == 0
    out, err = capsys.readouterr()
    assert "NOT CERTIFIED" in out
    assert "no thresholds passed at epsilon 0.1 and delta 0.1: the bundle exits nowhere from now on" in err
    manifest = open_bundle(bundle).manifest
    assert manifest.thresholds == (1.0, 1.0, 1.0)
    assert manifest.tuning is not None
    assert manifest.tuning["certified"] is False
    assert [tested["passed"] for tested in manifest.tuning["path"]] == [False]
    assert tide_export.load(bundle, threads=1).generate(demo_text_ids[:20], max_new_tokens=12).stats.exit_rate == 0
    assert main(["inspect", str(bundle)]) == 0
    assert "found none that passed" in capsys.readouterr().out


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_too_few_prompts_are_told_before_the_graph_runs(bundle: Path, capsys, never_run):
    line = refused(capsys, bundle, epsilon=0.02, delta=0.1)
    assert "needs 114 prompts to test on even if no token changes" in line
    assert f"dataset '{TEXT}' gives 25 for the test and 11 to choose candidates (10 documents, 0 more were seen" in line


def test_text_the_routers_saw_is_refused(bundle: Path, capsys, never_run):
    texts = [json.loads(line)["text"] for line in SEEN.read_text().splitlines()]
    assert f"({len(texts)} seen by the routers)" in refused(capsys, bundle, dataset=SEEN)
    calibration = open_bundle(bundle).manifest.calibration
    assert calibration is not None
    seen = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    edit(bundle, calibration=calibration | {"document_hashes": seen})
    assert f"({len(texts)} seen by the routers)" in refused(capsys, bundle, dataset=SEEN)


def test_unseen_documents_among_seen_ones_are_used_alone(bundle: Path, capsys, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(TEXT.read_text() + SEEN.read_text())
    calibration = open_bundle(bundle).manifest.calibration or {}
    texts = [json.loads(line)["text"] for line in SEEN.read_text().splitlines()]
    seen = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    edit(bundle, calibration=calibration | {"document_hashes": seen})
    report = tune(capsys, bundle, "--dry-run", dataset=mixed)
    assert report["documents_seen_by_routers"] == len(texts)
    assert report["overlap_checked"] == "per document"
    alone = tune(capsys, bundle, "--dry-run")
    assert report["path"] == alone["path"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epsilon": 0}, "epsilon must lie between 0 and 1"),
        ({"epsilon": 1.5}, "epsilon must lie between 0 and 1"),
        ({"epsilon": "nan"}, "epsilon must be a number, not nan"),
        ({"delta": 1}, "delta must lie between 0 and 1"),
        (["--prompts", "1"], "prompts must be a whole number, 2 or more"),
        (["--prompts-per-document", "0"], "prompts_per_document must be a whole number, 1 or more"),
        (["--prompt-length", "0"], "prompt_length must be a whole number, 1 or more"),
        (["--temperature", "-1"], "temperature must be a finite number, 0 or more"),
        (["--perplexity-epsilon", "-0.1"], "perplexity_epsilon must be a finite number, 0 or more"),
        (["--positions", "0"], "positions must be a whole number, 1 or more"),
        (["--positions", "100000"], "the model's context holds"),
        (["--min-layers", "-1"], "min_layers must be a whole number, 0 or more"),
        (["--min-layers", "10"], "min_layers is 10 but the last checkpoint comes after layer 9"),
        (["--slots", "1"], "slots must be a whole number, 2 or more, not 1"),
        (["--threads", "0"], "threads"),
        (["--model", "./no-such-model"], "no-such-model"),
        ({"dataset": "./none.txt"}, "no such file"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line(bundle: Path, capsys, never_run, options, says):
    given, words = (options, []) if isinstance(options, dict) else ({}, options)
    assert says in refused(capsys, bundle, *words, **given)


def test_the_model_s_weights_must_be_the_bundle_s(bundle: Path, demo_model: Path, capsys):
    assert tune(capsys, bundle, "--model", demo_model, "--dry-run")["certified"]
    model = json.loads((bundle / MANIFEST_FILE).read_text())["model"]
    edit(bundle, model=model | {"weights_sha256": "0" * 64})
    assert "was made from other weights" in refused(capsys, bundle, "--model", demo_model)


def test_a_bundle_without_checkpoints_has_nothing_to_tune(bundle: Path, monkeypatch):
    opened = open_bundle(bundle)
    full_depth = replace(opened.manifest, checkpoints=(), thresholds=())
    engine = SimpleNamespace(bundle=replace(opened, manifest=full_depth), manifest=full_depth, max_batch_size=1)
    monkeypatch.setattr("tide_export.tuning.tune.load", lambda *arguments, **options: engine)
    with pytest.raises(TuneError, match="no checkpoints"):
        tune_bundle(bundle, str(TEXT), epsilon=0.1, delta=0.1)


def test_more_slots_than_the_bundle_decodes_are_told_before_anything_is_measured(bundle: Path, never_run, monkeypatch):
    opened = open_bundle(bundle)
    engine = SimpleNamespace(bundle=opened, manifest=opened.manifest, max_batch_size=1)
    monkeypatch.setattr("tide_export.tuning.tune.load", lambda *arguments, **options: engine)
    with pytest.raises(ConfigError, match=r"slots 8: bundle .* decodes at most 1 at once"):
        tune_bundle(bundle, str(TEXT), epsilon=0.1, delta=0.1, slots=(4, 8))


@pytest.mark.parametrize("failure", [OSError(5, "the disk died"), KeyboardInterrupt()])
def test_a_failure_at_the_end_leaves_the_old_manifest(bundle: Path, capsys, monkeypatch, failure):
    before = written(bundle)

    def failing(self: Path, target: Path) -> None:
        raise failure

    monkeypatch.setattr(Path, "replace", failing)
    options = ["--dataset", str(TEXT), "--epsilon", "0.35", "--delta", "0.2", "-q", *QUICK]
    assert main(["tune", str(bundle), *options]) == (2 if isinstance(failure, OSError) else 130)
    assert written(bundle) == before


def test_a_bundle_exported_anew_meanwhile_is_left_alone(bundle: Path, capsys, monkeypatch):
    from tide_export.tuning import exits as tuning

    def meanwhile(*arguments):
        edit(bundle, created="2030-01-01T00:00:00+00:00")
        return certify(*arguments)

    certify = tuning.certify
    monkeypatch.setattr(tuning, "certify", meanwhile)
    options = ["--dataset", str(TEXT), "--epsilon", "0.35", "--delta", "0.2", "-q", *QUICK]
    assert main(["tune", str(bundle), *options]) == 2
    assert "changed by something else meanwhile" in capsys.readouterr().err
    assert open_bundle(bundle).manifest.tuning is None
