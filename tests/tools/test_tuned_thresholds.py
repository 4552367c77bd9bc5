"""`tools/checks/tuned_thresholds.py` on a tuned copy of the demo bundle: unseen documents alone, and an exit code that
tells."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import tide_export
from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.data.documents import document_hash
from tide_export.tuning.report import ExitReport
from tide_export.tuning.tune import tune

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"
TEXTS = [json.loads(line)["text"] for line in TEXT.read_text().splitlines()]
SHAPE = ["--prompts-per-document", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def tune_check():
    import tuned_thresholds as tune_check

    return tune_check


@pytest.fixture(scope="module")
def tuned(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo bundle, tuned on the first six documents."""
    folder = tmp_path_factory.mktemp("tuned")
    bundle = Path(shutil.copytree(demo_bundle, folder / "bundle"))
    (folder / "tune.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:6]))
    drawn = {"prompts": 36, "prompts_per_document": 6, "prompt_length": 12, "positions": 8, "perplexity_epsilon": 9.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tide_export.tuning.auto.NEW_TOKENS", 8)  # no test looks at its speed
        report = tune(bundle, str(folder / "tune.jsonl"), epsilon=0.4, delta=0.2, threads=1, **drawn)
    assert isinstance(report, ExitReport)
    assert report.certified is not None
    return bundle


@pytest.fixture
def bundle(tuned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tuned, tmp_path / "copy"))


def edit(bundle: Path, part: str, **changes: object) -> None:
    file = bundle / MANIFEST_FILE
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {part: manifest[part] | changes}))


def test_tune_records_the_documents_it_drew_from(tuned: Path):
    record = open_bundle(tuned).manifest.tuning
    assert record is not None
    assert sorted(record["document_hashes"]) == sorted(map(document_hash, TEXTS[:6]))


def test_documents_tune_saw_are_left_out_and_the_rest_is_measured(bundle: Path, tune_check, capsys, tmp_path: Path):
    before = (bundle / MANIFEST_FILE).read_bytes()
    out = tmp_path / "check.json"
    code = tune_check.main([str(bundle), "--dataset", str(TEXT), *SHAPE, "--json", str(out)])
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert (bundle / MANIFEST_FILE).read_bytes() == before
    assert found["left_out"] == 6
    assert sorted(name for name, *_ in found["documents"]) == sorted(map(document_hash, TEXTS[6:]))
    assert (found["certified"]["prompt_length"], found["certified"]["positions"]) == (12, 8)
    assert found["n"] == sum(prompts for _, prompts, *_ in found["documents"]) <= 16
    risks = sum(prompts * risk for _, prompts, risk, _ in found["documents"])
    assert risks / found["n"] == pytest.approx(found["risk"])
    assert sum(found["exits"].values()) == pytest.approx(1)
    assert sum(int(at) * share for at, share in found["exits"].items()) == pytest.approx(found["layers_per_token"])
    assert code == (0 if found["risk"] <= 0.4 else 1)
    for words in (
        f"{found['n']} prompts of 4 documents",
        "left out: 6",
        "exited after layer 12",
        "certified epsilon 0.4",
    ):
        assert words in text


def test_the_risk_is_what_generate_does(bundle: Path, tune_check, monkeypatch):
    drawn = []
    draw = tune_check.draw_prompts
    monkeypatch.setattr(tune_check, "draw_prompts", lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1])
    found = tune_check.check(str(bundle), str(TEXT), prompts=8, prompts_per_document=2, threads=1)
    engine = tide_export.load(bundle, threads=1)
    differing, layers = [], []
    for number, ids in enumerate(drawn[0].path + drawn[0].calibration):
        options = {
            "max_new_tokens": 1,
            "temperature": found["certified"]["temperature"],
            "seed": tune_check.SEED + number,
        }
        for end in range(found["certified"]["prompt_length"], len(ids) + 1):
            mine, full = (engine.generate(ids[:end], mode=mode, **options) for mode in ("exit", "full"))
            differing.append(mine.tokens != full.tokens)
            layers += mine.stats.exit_layer
    assert len(differing) == 8 * 8
    assert found["risk"] == pytest.approx(np.mean(differing), abs=1 / 64)
    assert found["layers_per_token"] == pytest.approx(np.mean(layers), abs=9 / 64)


def test_the_exit_code_says_when_the_promise_is_not_kept(bundle: Path, tune_check, capsys):
    options = ["--dataset", str(TEXT), *SHAPE, "--prompts", "4"]
    edit(bundle, "tuning", epsilon=0.99)
    assert tune_check.main([str(bundle), *options]) == 0
    assert "HOLDS: risk" in capsys.readouterr().out
    edit(bundle, "tuning", epsilon=1e-9)
    assert tune_check.main([str(bundle), *options]) == 1
    assert "DOES NOT HOLD: risk" in capsys.readouterr().out


def test_what_cannot_be_checked_is_one_line(bundle: Path, demo_bundle: Path, tune_check, capsys, monkeypatch):
    monkeypatch.setattr(tune_check, "measure_prompts", lambda *a: pytest.fail("the graph was run"))

    def refused(folder: Path, dataset: Path = TEXT) -> str:
        assert tune_check.main([str(folder), "--dataset", str(dataset), *SHAPE]) == 2
        return capsys.readouterr().err

    assert "was not tuned" in refused(demo_bundle)
    seen = bundle.parent / "seen.jsonl"
    seen.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:6]))
    assert "of which 0 can be used (6 seen" in refused(bundle, seen)
    record = open_bundle(bundle).manifest.tuning or {}
    edit(bundle, "tuning", thresholds=[0.5, 0.5, 0.5])
    assert "not those that `tune` certified" in refused(bundle)
    edit(bundle, "tuning", thresholds=record["thresholds"], document_hashes=None)
    assert "its tuning record does not say which documents were seen" in refused(bundle)


def test_the_error_between_documents_counts_a_document_once(tune_check):
    losses = np.array([0.0, 0.0, 0.0, 0.5, 0.5, 0.5])
    alone = tune_check.clustered_error(losses, np.arange(6))
    assert alone == pytest.approx(losses.std(ddof=1) / np.sqrt(6))
    together = tune_check.clustered_error(losses, np.array([0, 0, 0, 1, 1, 1]))
    assert together == pytest.approx(np.array([0.0, 0.5]).std(ddof=1) / np.sqrt(2))
    assert together > alone
