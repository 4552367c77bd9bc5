"""`validate`: holds on the demo bundle, and does not once a weight or a router is not what it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tide_export.bundle.file_names import MANIFEST_FILE, ROUTERS_FILE, WEIGHTS_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.cli.main import main
from tide_export.errors import BundleError, ConfigError, DatasetError, GenerationError, RouterFileError
from tide_export.routers.router_set import RouterSet
from tide_export.verify.validate import validate

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "demo" / "demo-llama")
TEXT = str(ROOT / "tide_export" / "*.py")
SMALL = {"prompts": 5, "longest_prompt": 40, "new_tokens": 8, "threads": 1}
GRAPH = SMALL | {"provider": "cpu", "thresholds": [0.5]}


@pytest.fixture
def copy(demo_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path / "copy"))


def sealed(bundle: Path, **changes) -> Path:
    """`bundle` with its manifest written anew: what was changed in it passes every checksum."""
    manifest = Manifest.from_json((bundle / MANIFEST_FILE).read_text())
    write_manifest(bundle, replace(manifest, **changes))
    return bundle


def test_holds_on_the_demo_bundle(demo_bundle: Path):
    report = validate(demo_bundle, MODEL, TEXT, **SMALL)
    assert report.holds, report.render()
    names = ["full", "0.3", "0.5", "0.7", "0.85", "0.95", "bundle", "lossless"]
    by_graph = ["model.onnx full", "model.onnx bundle"]
    assert [check.name for check in report.checks] == [*names, *(f"segments {name}" for name in names), *by_graph]
    assert report.prompt_lengths == sorted(report.prompt_lengths)
    assert (report.prompt_lengths[0], report.prompt_lengths[-1]) == (1, 40)
    full = report.checks[0]
    assert full.tokens == full.same_as_full == 5 * 8
    assert full.layers_executed == 12 * full.tokens
    assert full.max_error < 1e-3
    assert set().union(*(check.exits for check in report.checks)) >= {3, 6, 9, 12}, "every checkpoint must take part"
    lossless = report.checks[7]
    assert lossless.same_as_full + lossless.within_tolerance >= lossless.tokens == 5 * 8
    assert lossless.drafted >= lossless.accepted > 0
    assert f"{2 * lossless.accepted} of {2 * lossless.drafted} drafts accepted" in report.render()
    assert [(one.engine, one.prompts, one.holds) for one in report.batches] == [("", 4, True), ("segments", 4, True)]
    for one in report.batches:
        assert [check.name for check in one.checks] == ["full", one.checks[1].name, "lossless"]
        assert one.checks[1].name in [f"exit at {name}" for name in names[1:7]]
        assert [check.tokens for check in one.checks] == [4 * 8] * 3
        assert one.lines()[0] in report.render()
    assert [one["prompts"] for one in report.as_dict()["batches"]] == [4, 4]
    lazy = report.checks[1]
    assert lazy.layers_executed < full.layers_executed, "exits must save layers"


def test_max_pending_changes_nothing_but_the_layers_run(demo_bundle: Path):
    by_limit = {}
    for limit in (0, 1, 16):
        report = validate(demo_bundle, MODEL, TEXT, max_pending=limit, **GRAPH | {"prompts": 3})
        assert report.holds, report.render()
        by_limit[limit] = report.checks[1]
    assert by_limit[0].exits == by_limit[1].exits == by_limit[16].exits
    assert by_limit[0].layers_executed == 12 * by_limit[0].tokens
    assert by_limit[16].layers_executed < by_limit[1].layers_executed < by_limit[0].layers_executed


def test_does_not_hold_when_a_weight_was_altered(copy: Path, capsys):
    path = copy / WEIGHTS_FILE
    weights = np.fromfile(path, np.float32)
    third = len(weights) // 3
    weights[third : 2 * third] *= 1.5
    weights.tofile(path)
    sealed(copy)
    report = validate(copy, MODEL, TEXT, **GRAPH)
    assert not report.holds
    assert report.checks[0].wrong, "full depth must differ"
    assert "DOES NOT HOLD" in report.render()
    assert report.checks[0].differences[0] in report.render()

    few = ["--prompts", "2", "--longest-prompt", "40", "--new-tokens", "8"]
    code = main(["validate", str(copy), "--model", MODEL, "--dataset", TEXT, *few, "--json", "-q"])
    answer = json.loads(capsys.readouterr().out)
    assert code == 1
    assert answer["holds"] is False
    assert len(answer["checks"]) == 2 * 8 + 2  # batch networks and segment networks; the graph
    assert [check["holds"] for check in answer["checks"][-2:]] == [False, False]


def test_does_not_hold_when_the_graph_has_other_routers(copy: Path):
    path = copy / ROUTERS_FILE
    routers = RouterSet.load(path)
    routers.routers[6].up.weight.data *= -1.0
    routers.save(path)
    report = validate(sealed(copy), MODEL, TEXT, **GRAPH)
    assert report.checks[0].holds, "full depth does not depend on routers"
    assert not report.holds
    assert any("layer" in difference for check in report.checks for difference in check.differences)


def test_does_not_hold_for_another_checkpoint_s_graph(copy: Path, demo_bundle: Path):
    """Routers of checkpoints 3 and 6 swapped in the reference: same shapes, other scores."""
    path = copy / ROUTERS_FILE
    routers = RouterSet.load(path)
    routers.routers[3], routers.routers[6] = routers.routers[6], routers.routers[3]
    routers.save(path)
    assert not validate(sealed(copy), MODEL, TEXT, **GRAPH).holds


def test_the_model_must_be_the_one_the_bundle_was_made_from(demo_bundle: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.model.layers[5].mlp.down_proj.weight.data[0, 0] += 1.0
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(BundleError, match="other weights"):
        validate(demo_bundle, str(tmp_path / "other"), TEXT)


def test_routers_for_other_checkpoints_are_refused(copy: Path):
    path = copy / ROUTERS_FILE
    routers = RouterSet.load(path)
    RouterSet({3: routers.routers[3], 6: routers.routers[6]}, routers.provenance).save(path)
    with pytest.raises(BundleError, match=r"checkpoints \[3, 6\]"):
        validate(sealed(copy), MODEL, TEXT)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(RouterFileError, match="corrupt"):
        validate(sealed(copy), MODEL, TEXT)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"prompts": 0}, ConfigError, "prompts"),
        ({"new_tokens": 0}, ConfigError, "new_tokens"),
        ({"longest_prompt": 1000, "new_tokens": 100}, ConfigError, "context"),
        ({"max_pending": -1}, ConfigError, "max_pending"),
        ({"thresholds": [0.5, 1.5]}, GenerationError, r"\[0, 1\]"),
        ({"dataset": "./none.txt"}, DatasetError, "no such file"),
    ],
)
def test_bad_requests_are_refused(demo_bundle: Path, options, error, says):
    dataset = options.pop("dataset", TEXT)
    with pytest.raises(error, match=says):
        validate(demo_bundle, MODEL, dataset, **options)


def test_without_a_recorded_dataset_one_must_be_given(copy: Path):
    with pytest.raises(ConfigError, match="--dataset"):
        validate(sealed(copy, calibration=None), MODEL)


def test_the_command_prints_the_table_and_returns_0(demo_bundle: Path, capsys):
    small = ["--prompts", "2", "--new-tokens", "4", "--threshold", "0.5"]
    assert main(["validate", str(demo_bundle), "--model", MODEL, "--dataset", TEXT, *small]) == 0
    out = capsys.readouterr().out
    assert "HOLDS" in out
    assert "exit@3" in out
