"""What cannot be exported is refused before anything is calibrated, in one sentence."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from families import FAMILIES, REFUSED, build
from transformers import masking_utils

from tide_export.calibration.config import TideConfig
from tide_export.errors import (
    BundleError,
    ConfigError,
    DatasetError,
    GraphError,
    ModelError,
    TideError,
    TraceError,
    UnsupportedModelError,
)
from tide_export.pipeline import flow, pieces, preflight
from tide_export.pipeline.calibrate import calibrate
from tide_export.pipeline.flow import export


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_export.calibration.flow.calibrate", lambda *_: pytest.fail("calibrated first"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("a few words")
    return str(tmp_path / "text.txt")


def says(error: pytest.ExceptionInfo[TideError]) -> str:
    sentence = str(error.value)
    assert "\n" not in sentence
    assert "torch" not in sentence
    return sentence


@pytest.mark.parametrize("family", [family for family in REFUSED if FAMILIES[family].refused == "recurrent state"])
def test_a_family_that_cannot_be_exported(family: str, tmp_path: Path) -> None:
    source = build(family)
    source.model.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=FAMILIES[family].refused) as exported:
        export(str(tmp_path / "model"), tmp_path / "out", max_length=64)
    with pytest.raises(UnsupportedModelError, match=FAMILIES[family].refused) as calibrated:
        calibrate(str(tmp_path / "model"), tmp_path / "routers.safetensors")
    assert source.architecture in says(exported)
    assert says(calibrated) == says(exported)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_masks_that_cannot_be_exported(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "causal_mask_function", masking_utils.bidirectional_mask_function)
    for run in (export, calibrate):
        with pytest.raises(UnsupportedModelError, match="masks attention in a way") as error:
            run(str(small_model), tmp_path / "out")
        assert "LlamaForCausalLM" in says(error)


@pytest.mark.parametrize("targets", [("onnxruntime",), ("tensorrt",)])
@pytest.mark.parametrize(("checkpoints", "traced"), [((3, 6, 9), (3, 6, 9)), (None, (4, 8)), ("auto", (6,))])
def test_whatever_the_trace_refuses(
    tmp_path: Path, small_model: Path, text: str, monkeypatch: pytest.MonkeyPatch, targets, checkpoints, traced
) -> None:
    tried = []

    def refuse(source, checkpoints, *_):
        tried.append(checkpoints)
        raise UnsupportedModelError("it computes with an abacus")

    monkeypatch.setattr(pieces, "trace", refuse)
    config = TideConfig(checkpoints=checkpoints, calibration_dataset=text)
    with pytest.raises(UnsupportedModelError, match="abacus"):
        export(str(small_model), tmp_path / "out", config=config, targets=targets, engines=False)
    assert tried == [traced], "the checkpoints there will be, or one in the middle"


def test_a_failure_of_the_exporter(tmp_path: Path, small_model: Path, text: str, monkeypatch) -> None:
    def fail(*_, **__):
        raise RuntimeError("torch.fx does not know how\nto do this\n")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(TraceError, match="LlamaForCausalLM") as error:
        export(str(small_model), tmp_path / "out", config=TideConfig(calibration_dataset=text))
    says(error)


@pytest.mark.parametrize("part", ["trace", "cut"])
def test_a_failure_of_the_graph_builder(tmp_path: Path, small_model: Path, text: str, monkeypatch, part: str) -> None:
    def fail(*_, **__):
        raise ValueError("a value is an output\nof the graph")

    monkeypatch.setattr(pieces, "trace", lambda *_, **__: None)
    monkeypatch.setattr(pieces, part, fail)
    with pytest.raises(
        UnsupportedModelError,
        match=r"^LlamaFor.* raises ValueError \(a value is an output\); change its code, or report",
    ) as error:
        export(str(small_model), tmp_path / "out", config=TideConfig(calibration_dataset=text))
    says(error)


def test_what_tensorrt_does_not_take(tmp_path: Path, demo_model: Path, text: str, monkeypatch) -> None:
    stored = pieces.trace

    def with_a_large_weight(*arguments, **options):
        traced = stored(*arguments, **options)
        weights = traced.model.graph.initializers
        weight = next(value for name, value in weights.items() if name.endswith("layers.2.input_layernorm.weight"))
        numbers = weight.const_value.numpy().copy()
        numbers[1] = 1e6
        weight.const_value = ir.tensor(numbers, name=weight.name)
        return traced

    config = TideConfig(checkpoints=(3, 6, 9), calibration_dataset=text)
    options = {"config": config, "targets": ("tensorrt",), "engines": False}
    monkeypatch.setattr(pieces, "trace", with_a_large_weight)
    with pytest.raises(GraphError, match="a number too large for float16: use bf16 or fp32") as error:
        export(str(demo_model), tmp_path / "out", weights="fp16", **options)
    says(error)
    monkeypatch.setattr(pieces, "trace", stored)
    monkeypatch.setattr("tide_export.lower.tensorrt.lower.NOT_TAKEN", frozenset(["Sigmoid"]))
    with pytest.raises(UnsupportedModelError, match="computes with Sigmoid") as error:
        export(str(demo_model), tmp_path / "out", **options)
    says(error)


def test_a_length_that_nothing_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "load_model", lambda *_, **__: build("bloom"))
    with pytest.raises(ConfigError, match="give --max-length"):
        export("bloom", tmp_path / "out")


def test_a_model_without_a_tokenizer(tmp_path: Path, small_model: Path, text: str) -> None:
    shutil.copytree(small_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelError, match="tokenizer"):
        export(str(tmp_path / "model"), tmp_path / "out", config=TideConfig(calibration_dataset=text))


def test_a_dataset_that_cannot_be_read(tmp_path: Path, small_model: Path, text: str) -> None:
    Path(text).write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(DatasetError, match="is not UTF-8 text"):
        export(str(small_model), tmp_path / "out", config=TideConfig(calibration_dataset=text))


@pytest.mark.parametrize("option", ["calibration_dataset", "self_generated"])
def test_a_missing_file_of_text_is_said_before_the_model_is_loaded(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("flow", "calibrate"):
        monkeypatch.setattr(f"tide_export.pipeline.{module}.load_model", lambda *_, **__: pytest.fail("loaded first"))
    config = TideConfig.from_options(**{option: str(tmp_path / "no-text.jsonl")})
    for make in (export, calibrate):
        with pytest.raises(DatasetError, match=r"no-text\.jsonl"):
            make("model", tmp_path / "out", config=config)


def test_several_processes(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.Processes, "current", lambda: preflight.Processes(0, 2))
    with pytest.raises(ConfigError, match="export runs in one process"):
        export(str(small_model), tmp_path / "out")


def test_a_disk_without_space(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100_000))
    with pytest.raises(
        BundleError, match=r"no space left on the disk for bundle '.*out'.* take [\d.]+ kB and 100\.0 kB are free"
    ):
        export(str(small_model), tmp_path / "out", weights="fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_router_file_that_cannot_be_written(tmp_path: Path, small_model: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write routers"):
        calibrate(str(small_model), tmp_path / "routers.safetensors")


def test_a_router_file_where_a_folder_is(tmp_path: Path, small_model: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder"):
        calibrate(str(small_model), tmp_path)
