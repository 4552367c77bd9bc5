"""The store of traces gives what tracing gives, once a version of what makes it, whoever else uses the folder."""

import errno
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
import traces as store_of_traces
from families import build
from traces import FOLDERS, PACKAGE, Traces

from tide_export.bundle.manifest import Quantization
from tide_export.quantize.flow import quantize_model
from tide_export.trace.tracer import TracedModel, trace

sys.path.insert(0, str(PACKAGE.parent / "tools" / "checks"))
try:
    import structure
finally:
    sys.path.pop(0)

# Imported, but what they say is in no trace: names and types of errors and of records, memory.
NOT_TRACED = {"tide_export.errors", "tide_export.bundle", "tide_export.common", "tide_export"}


@pytest.fixture(scope="module")
def real() -> bytes:
    """A trace of the tiny Llama at checkpoints 1 and 2."""
    return ir.to_proto(trace(build("llama"), (1, 2)).model).SerializeToString()


@pytest.fixture
def made(real: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The checkpoints of what was traced, and not read from a file; each trace is a copy of the real one, so marked."""
    calls = list[Any]()

    def counted(source: Any, checkpoints: Any, *_: Any) -> TracedModel:
        calls.append(checkpoints)
        model = ir.from_proto(onnx.ModelProto.FromString(real))
        model.metadata_props["number"] = str(len(calls))
        return TracedModel(model, (0, *checkpoints, source.num_layers), False, source.architecture)

    monkeypatch.setattr(store_of_traces, "trace", counted)
    return calls


def text(traced: Any) -> str:
    return ir.to_proto(traced.model).SerializeToString().hex()


def test_a_trace_is_made_once_and_read_from_then_on(tmp_path: Path, made: list[Any]) -> None:
    first = Traces(tmp_path)(build("llama"), (1, 2))
    second, third = Traces(tmp_path)(build("llama"), (1, 2)), Traces(tmp_path)(build("llama"), (1,))
    assert len(made) == 2
    assert text(first) == text(second) != text(third)
    assert first.boundaries == second.boundaries == (0, 1, 2, 3)
    assert first.architecture == second.architecture == "LlamaForCausalLM"


def test_a_real_trace_is_the_same_after_the_store(tmp_path: Path, real: bytes) -> None:
    for _ in range(2):
        found = Traces(tmp_path)(build("llama"), (1, 2))
        assert ir.to_proto(found.model).graph == onnx.ModelProto.FromString(real).graph


def test_a_model_that_was_changed_after_loading_is_traced_anew(tmp_path: Path, made: list[Any]) -> None:
    traced, source = Traces(tmp_path), build("llama")
    traced(source, (1, 2))
    with torch.no_grad():
        source.model.lm_head.weight[0, 0] += 1
    traced(source, (1, 2))
    quantize_model(source, Quantization("rtn", 4, 32, True, 4))
    traced(source, (1, 2))
    assert len(made) == 3


def test_two_workers_trace_a_model_once(tmp_path: Path, made: list[Any]) -> None:
    sources = [build("llama") for _ in range(2)]
    with ThreadPoolExecutor(2) as executor:
        one, other = executor.map(lambda source: Traces(tmp_path)(source, (1, 2)), sources)
    assert len(made) == 1
    assert text(one) == text(other)


def test_an_interrupted_run_leaves_nothing_that_is_read(tmp_path: Path, made: list[Any]) -> None:
    traced = Traces(tmp_path)
    traced(build("llama"), (1, 2))
    (file,) = traced.folder.glob("*.onnx")
    file.with_suffix(".partial").write_bytes(file.read_bytes()[:1000])
    file.unlink()
    assert traced(build("llama"), (1, 2)).model.metadata_props["number"] == "2"
    assert len(made) == 2


def test_a_full_disk_costs_time_and_no_test(tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: ir.Model, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    traced = Traces(tmp_path)
    monkeypatch.setattr(ir, "save", full)
    with pytest.warns(UserWarning, match="a trace is not kept: .*No space left"):
        assert traced(build("llama"), (1, 2)).boundaries == (0, 1, 2, 3)
    assert {path.suffix for path in traced.folder.iterdir()} == {"", ".lock"}


def test_old_versions_go_unless_they_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {}
    for number in range(6):
        monkeypatch.setattr(store_of_traces, "version", lambda number=number: f"version-{number}")
        one = Traces(tmp_path)
        if number == 1:
            opened[number] = one
        os.utime(one.folder, (number, number))
        del one
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"version-{n}" for n in (1, 3, 4, 5)]


def test_the_version_is_of_all_that_tracing_imports() -> None:
    found = structure.reach(structure.imports(PACKAGE.parent))["tide_export.trace.tracer"]
    units = {".".join(module.split(".")[:2]) for module in found}
    assert units - NOT_TRACED == {f"tide_export.{folder}" for folder in FOLDERS}
