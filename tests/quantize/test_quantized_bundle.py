"""From the command line to a checked bundle: calibrated on the quantized model, and validated against its integers."""

import json
from pathlib import Path

import pytest

from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.model.source import load_model
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load
from tide_export.verify.validate import validate

ROOT = Path(__file__).parents[2]


def test_export_quantizes_calibrates_and_validate_rebuilds_the_reference(
    two_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.jsonl"
    lines = (ROOT / "calibration" / "text" / "python-stdlib.jsonl").read_text().splitlines()
    text.write_text("\n".join(json.dumps({"text": json.loads(line)["text"][:2000]}) for line in lines[:16]))
    bundle = tmp_path / "bundle"
    arguments = ["--checkpoints", "1", "--min-layers", "1", "--dataset", str(text), "--calibration-samples", "24"]
    arguments += ["--calibration-length", "64", "--router-epochs", "1", "--no-report"]
    arguments += ["--weights", "int4", "--quantization", "gptq", "--block-size", "64", "--symmetric", "no"]
    assert main(["export", str(two_layers), "-o", str(bundle), *arguments]) == 0
    said = capsys.readouterr().err
    assert "quantized 15 matrices" in said  # seven a layer, and the embedding that is the head too

    manifest = open_bundle(bundle).manifest
    assert manifest.weights == "int4"
    how = {"method": "gptq", "bits": 4, "block_size": 64, "symmetric": False, "accuracy_level": 4}
    assert vars(manifest.quantization) == how | {"budget": None}
    assert RouterSet.load(bundle / "routers.safetensors").provenance["quantization"] == how
    full = load_model(str(two_layers))
    assert manifest.model.weights_sha256 == full.weights_sha256
    assert (bundle / "model.onnx.data").stat().st_size < 0.35 * sum(4 * p.numel() for p in full.model.parameters())

    report = validate(bundle, str(two_layers), prompts=3, longest_prompt=24, new_tokens=8, thresholds=[0.5])
    assert report.holds, report.render()
    assert report.weight_error is not None
    assert 0.03 < report.weight_error < 0.2
    assert [check.name for check in report.checks[:4]] == [
        "float32 matmuls full",
        "float32 matmuls 0.5",
        "float32 matmuls bundle",
        "float32 matmuls lossless",
    ]
    exact, own = report.checks[0], report.checks[4]
    assert own.name == "full"
    assert exact.max_error < 1e-4 * exact.largest_logit < own.max_error
    assert "the bundle's weights" in report.render()
    assert report.as_dict()["weight_error"] == report.weight_error

    assert (
        len(
            load(bundle).generate([5, 6, 7], max_new_tokens=4, mode="lossless", threshold=0.2, stop_token_ids=[]).tokens
        )
        == 4
    )
    assert main(["inspect", str(bundle), "--no-verify"]) == 0
    assert "4 bits by gptq, blocks of 64, with zero points, level 4" in capsys.readouterr().out
