"""A request to export: checked when it is made, and what follows from it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.errors import ConfigError
from tide_export.pipeline import calibrate, flow
from tide_export.pipeline.flow import export
from tide_export.pipeline.request import ExportRequest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"targets": ("abacus",)}, "target 'abacus' is none of onnxruntime, cuda, tensorrt, tensorrt-rtx"),
        ({"weights": "int2"}, "weights 'int2' are not in this release"),
        ({"targets": ("tensorrt", "tensorrt-rtx")}, "the segment networks of one target"),
        ({"targets": ("cuda", "tensorrt")}, "the segment networks of one target"),
        *(
            ({"targets": ("cuda",), "weights": weights}, f"cuda takes weights bf16, fp16 or int4, not '{weights}'")
            for weights in ("fp32", "int8", "fp8")
        ),
        ({"targets": ("cuda",), "lora_rank": 8}, "networks of cuda read no adapters"),
        ({"targets": ("cuda",), "config": TideConfig(kv_cache="int8")}, "kv_cache int8 is .* alone, not for cuda"),
        ({"targets": ("tensorrt",), "weights": "int8"}, "'int8' are for target onnxruntime alone"),
        ({"weights": "fp8"}, "'fp8' are for targets tensorrt and tensorrt-rtx"),
        ({"plugins": "x.so"}, "--plugins is for building plans"),
        ({"targets": ("tensorrt",), "engines": False, "plugins": "x.so"}, "--plugins is for building plans"),
        ({"batch_size": 4}, "batch_size is for targets cuda, tensorrt and tensorrt-rtx"),
        (
            {"targets": ("tensorrt",), "engines": False, "batch_size": 0},
            "batch_size must be a whole number from 1 to 256, not 0",
        ),
        ({"block_size": 32}, "--block-size is for weights int8 and int4, not for auto"),
        ({"weights": "int4", "quantization": "awq"}, "'awq' is none of rtn, gptq"),
    ],
)
def test_contradictions_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExportRequest("model", "out", **options)


def test_what_follows_from_a_request() -> None:
    plain = ExportRequest("model", "out")
    assert (plain.flavour, plain.plugin_library, plain.quantization_settings) == (None, None, None)
    assert plain.config == ExportRequest("model", "out", config=None).config == TideConfig()
    request = ExportRequest("model", "out", targets=("onnxruntime", "tensorrt-rtx"), engines=False, batch_size=3)
    assert request.flavour is not None
    assert (request.flavour.name, request.max_batch_size) == ("tensorrt-rtx", 3)
    cuda = ExportRequest("model", "out", targets=("cuda",), weights="bf16", batch_size=3)
    assert (cuda.flavour, cuda.network_target, cuda.half) == (None, "cuda", "bf16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.model = "other"


def test_export_takes_a_request_or_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load(model, device_map, trust_remote_code, packed):
        loaded.append((model, device_map))
        raise ConfigError("enough")

    monkeypatch.setattr(flow, "load_model", load)
    for run in (
        lambda: export("model", tmp_path / "out", device_map="auto"),
        lambda: export(output=tmp_path / "out", model="model", device_map="auto"),
        lambda: export(ExportRequest("model", tmp_path / "out", device_map="auto")),
    ):
        with pytest.raises(ConfigError, match="enough"):
            run()
    assert loaded == [("model", "auto")] * 3
    with pytest.raises(ConfigError, match="ExportRequest has no option 'wights': did you mean 'weights'"):
        export("model", tmp_path / "out", wights="int4")


@pytest.mark.parametrize("option", [[], ["--no-report"]])
def test_the_report_may_be_omitted(
    option: list[str], demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reports = SimpleNamespace(routers="routers", assessment="assessment"), []
    monkeypatch.setattr(calibrate, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(calibrate, "headline", lambda _: "")
    monkeypatch.setattr(calibrate.calibration, "calibrate", lambda *_: made)
    monkeypatch.setattr(calibrate, "write_report", lambda assessment, path: reports.append(path))
    monkeypatch.setattr(
        flow, "_write_graphs", lambda request, folder: calibrate.calibrate_for_bundle("", request, folder)
    )
    with pytest.raises(ValueError, match="unpack"):  # routers are no manifest
        main(["export", str(demo_model), "-o", str(tmp_path / "out"), *option])
    assert [path.name for path in reports] == ([] if option else ["report.html"])
