"""`tide-export draft` on a real bundle: what it writes, and that the bundle's tokens stay those of full."""

import json
import shutil
from pathlib import Path

import pytest

from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.drafting.bundle import check_bundle
from tide_export.errors import DraftError
from tide_export.report.wording import percent
from tide_export.runtime.engine import load


def test_a_drafter_is_trained_written_and_used(
    demo_model: Path, demo_bundle: Path, tmp_path: Path, few_drafts, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "b"
    shutil.copytree(demo_bundle, bundle)
    before = open_bundle(bundle).manifest
    command = ["draft", str(demo_model), str(bundle), "--minutes", "0.02", "--max-new-tokens", "24", "-q", "--json"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] > 100
    assert said["measured_speed"] > 0
    manifest = open_bundle(bundle).manifest  # every hash
    assert manifest.drafter is not None
    assert manifest.drafter.record is not None
    assert manifest.drafter.record["settings"]["model"] == manifest.model.weights_sha256
    assert set(manifest.files) == set(before.files) | {"drafter.onnx", "segments/drafter.onnx"}
    page = (bundle / "report.html").read_text("utf-8")
    assert page.count("<h2>Drafts of lossless mode</h2>") == 1
    assert f"trained on {said['tokens']:,} tokens" in page
    assert f"<td>{percent(said['acceptance']['sampled'][0])}</td>" in page
    assert (demo_bundle / "report.html").read_text("utf-8").count("Drafts of lossless mode") == 0
    assert manifest.drafting is not None
    assert (manifest.drafting.verify_costs, manifest.drafting.drafter_cost) == (None, None), "of no machine"
    assert not (tmp_path / ".b.draft").exists()
    checkpoints = len(manifest.checkpoints)  # none of these exits, and drafts cost nothing: what was measured is chance
    free = Drafting((1.0,) * checkpoints, 0, 0, (1.0,) * checkpoints, (0.0,) * 5, {}, 4, 0.0)
    engine = load(bundle, threads=1).drafting_as(free)
    for temperature in (0.0, 0.8):
        options = {"temperature": temperature, "seed": 3, "max_new_tokens": 40, "stop_token_ids": []}
        full = engine.generate([50, 60, 70], mode="full", **options)
        drafted = engine.generate([50, 60, 70], mode="lossless", **options)
        assert drafted.tokens == full.tokens
        assert drafted.stats.learned_drafted
    # Again, in place of the first: the bundle stays whole.
    assert main([*command[:-1], "--seed", "1"]) == 0
    assert "draft 1" in capsys.readouterr().out
    assert (bundle / "report.html").read_text("utf-8").count("<h2>Drafts of lossless mode</h2>") == 1
    assert open_bundle(bundle).manifest.drafter is not None


def test_an_embedding_of_another_width_is_refused_before_any_work(demo_bundle: Path) -> None:
    check_bundle(demo_bundle, None, open_bundle(demo_bundle).manifest.model.hidden_size)
    with pytest.raises(DraftError, match="numbers a token first, not the 7 of the model's embedding"):
        check_bundle(demo_bundle, None, 7)
