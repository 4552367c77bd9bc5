"""Calibration from end to end on the demo model: the record it leaves, what it reports, what it refuses."""

import logging
from pathlib import Path

import pytest
import torch

import tide_export
from tide_export.calibrate import calibrate
from tide_export.config import TideConfig
from tide_export.errors import CalibrationError, ConfigError, DatasetError
from tide_export.routers import RouterSet

TEXT = Path(__file__).parents[2] / "calibration" / "text" / "python-stdlib-validation.jsonl"


def config(**options):
    given = {
        "calibration_dataset": str(TEXT),
        "checkpoints": (3, 9),
        "calibration_samples": 16,
        "calibration_length": 64,
        "router_epochs": 2,
        "router_bottleneck_dim": 8,
    }
    return TideConfig.from_options(**(given | options))


@pytest.fixture(scope="module")
def made(demo, tokenizer):
    return calibrate(demo, tokenizer, config())


def test_one_router_per_checkpoint(made, demo):
    assert made.checkpoints == (3, 9)
    assert (made.hidden_size, made.bottleneck) == (demo.normed_size, 8)
    made.check(demo, "in memory")


def test_provenance(made, demo):
    found = made.provenance
    assert found["model"] == demo.name
    assert found["weights_sha256"] == demo.weights_sha256
    assert (found["num_layers"], found["hidden_size"]) == (12, 128)
    assert found["dataset"] == str(TEXT)
    assert len(found["dataset_sha256"]) == 64
    assert (found["documents"], found["sequences"], found["split"]) == (10, 16, "documents")
    assert found["tokens"] == 16 * 64
    assert found["label"] == "agreement"
    assert TideConfig.from_options(**found["config"]) == config()
    assert set(found["versions"]) == {"tide_export", "torch", "transformers", "datasets"}
    assert found["versions"]["tide_export"] == tide_export.__version__
    report = found["report"]
    assert set(report) == {"3", "9"}
    assert report["3"]["tokens"] + report["3"]["train_tokens"] == 16 * 64
    assert report["3"]["positive_rate"] < report["9"]["positive_rate"]


def test_survives_the_file(made, tmp_path):
    made.save(tmp_path / "routers.safetensors")
    loaded = RouterSet.load(tmp_path / "routers.safetensors")
    assert loaded.provenance == made.provenance
    for layers in made.checkpoints:
        assert torch.equal(loaded.routers[layers].down.weight, made.routers[layers].down.weight)


def test_repeats_exactly(made, demo, tokenizer):
    again = calibrate(demo, tokenizer, config())
    assert again.provenance == made.provenance
    assert all(torch.equal(again.routers[k].up.weight, made.routers[k].up.weight) for k in made.checkpoints)


def test_one_document_is_split_by_sequence_and_said_so(demo, tokenizer, tmp_path, caplog):
    path = tmp_path / "one.txt"
    path.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(200)))
    with caplog.at_level(logging.WARNING, logger="tide_export"):
        made = calibrate(demo, tokenizer, config(calibration_dataset=str(path)))
    assert made.provenance["split"] == "sequences"
    assert "too few documents" in caplog.text


def test_labels_of_one_class_are_said_so(demo, tokenizer, caplog):
    with caplog.at_level(logging.INFO, logger="tide_export"):
        made = calibrate(demo, tokenizer, config(label="cosine", checkpoints=(1,), convergence_threshold=0.99))
    report = made.provenance["report"]["1"]
    assert report["positive_rate"] == report["train_positive_rate"] == 0.0
    assert report["precision"] is None
    assert "checkpoint 1: no token" in caplog.text
    assert "precision n/a, recall n/a" in caplog.text


def test_sequences_fit_the_models_context(demo, tokenizer):
    made = calibrate(demo, tokenizer, config(calibration_samples=2, calibration_length=4000))
    assert made.provenance["tokens"] <= 2 * demo.context_length == 2048


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"checkpoints": (12,)}, ConfigError, r"checkpoints must lie in 1\.\.11"),
        ({"calibration_dataset": "./none.txt"}, DatasetError, "no such file"),
    ],
)
def test_refusals(demo, tokenizer, options, error, reason):
    with pytest.raises(error, match=reason):
        calibrate(demo, tokenizer, config(**options))


def test_too_little_text(demo, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x = 1\n")
    with pytest.raises(CalibrationError, match="at least 2"):
        calibrate(demo, tokenizer, config(calibration_dataset=str(tmp_path / "a.txt")))
