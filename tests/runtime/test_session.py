"""Opening a session: the provider asked for or a refusal; damaged graphs and those of another manifest are refused."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bundles import edit
from tiny_model import TinyModel, write_networks

from tide_export.bundle.file_names import batch_file
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.errors import BundleError, ConfigError
from tide_export.names.networks import HEAD, segment_name
from tide_export.runtime.engine import load


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_threads_out_of_range_are_refused(tiny_bundle: Path, threads: int) -> None:
    with pytest.raises(ConfigError, match="threads must be"):
        load(tiny_bundle, threads=threads)


@pytest.mark.parametrize("provider", ["auto", "cpu"])
def test_the_provider_chosen_is_logged_once(tiny_bundle: Path, provider: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tide_export"):
        engine = load(tiny_bundle, provider=provider, threads=2)
        engine.generate([1, 2], max_new_tokens=4)
    [record] = caplog.records
    assert "on the CPU, 2 threads" in record.getMessage()


def test_onnx_runtime_leaves_nothing_to_send(tiny_bundle: Path, tmp_path: Path) -> None:
    code = "import sys, tide_export; tide_export.load(sys.argv[1], threads=1).generate([1, 2], max_new_tokens=4)"
    left = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    environment = left | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code, str(tiny_bundle)], env=environment, check=True)
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name] == []


def test_a_graph_that_is_not_onnx_is_one_sentence(tmp_path: Path, tiny: TinyModel) -> None:
    with writing_bundle(tmp_path / "b") as folder:
        write_networks(folder, tiny.described())
        (folder / batch_file(HEAD)).write_bytes(b"not a graph")
        write_manifest(folder, tiny.manifest())
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot load '.*batch/head\.onnx'") as error:
        load(tmp_path / "b")
    assert "\n" not in str(error.value)


def write_with_graph_of(path: Path, graph: TinyModel, manifest: TinyModel) -> Path:
    with writing_bundle(path) as folder:
        write_networks(folder, graph.described())
        write_manifest(folder, manifest.manifest())
    return path


def test_a_graph_of_another_manifest_is_refused(tmp_path: Path, tiny: TinyModel) -> None:
    deeper = TinyModel(layers=7)
    with pytest.raises(BundleError, match=r"has no input pages\.6\.key"):
        load(write_with_graph_of(tmp_path / "a", graph=tiny, manifest=deeper))
    with pytest.raises(BundleError, match=r"has the input pages\.6\.key"):
        load(write_with_graph_of(tmp_path / "b", graph=deeper, manifest=tiny))
    full = TinyModel(checkpoints=())
    with pytest.raises(BundleError, match="exported with other checkpoints than its manifest's 2,4"):
        load(write_with_graph_of(tmp_path / "c", graph=full, manifest=tiny))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (
            ("checkpoints",),
            [2, 5],
            "was exported with other checkpoints than its manifest's 2,5: export",
        ),
        (("model", "context_length"), 512, "was exported with other context_length than its manifest's 512"),
        (("model", "context_length"), None, "was exported with other context_length than its manifest's none"),
        (
            ("model", "vocab_size"),
            10**12,
            r"output logits is float32 \[1, 'tokens', 48\], but its manifest",
        ),
        (
            ("model", "hidden_size"),
            2**62,
            "was exported with other hidden_size than its manifest's 4611686018427387904",
        ),
        (("model", "kv_shapes", 5), [2, 4], r"input pages\.5\.key is float32 \['tokens', 1, 'tokens', 8\], but its"),
    ],
)
def test_what_the_graph_was_not_exported_with_is_refused(
    tmp_path: Path, tiny: TinyModel, keys: tuple, value: object, says: str
) -> None:
    bundle = tiny.write(tmp_path / "b")
    edit(bundle, *keys, value=value)
    with pytest.raises(BundleError, match=says):
        load(bundle)


def test_a_hidden_size_that_no_tensor_shows_is_compared(tmp_path: Path) -> None:
    bundle = TinyModel(checkpoints=()).write(tmp_path / "b")
    edit(bundle, "model", "hidden_size", value=2**62)
    with pytest.raises(BundleError, match="with other hidden_size than its manifest's 4611686018427387904"):
        load(bundle)


def test_networks_of_an_earlier_release_run_without_a_record(tmp_path: Path, tiny: TinyModel) -> None:
    with writing_bundle(tmp_path / "b") as folder:
        write_networks(folder, {batch_file(name): model for name, model in tiny.networks().items()})
        write_manifest(folder, tiny.manifest())
    assert len(load(tmp_path / "b", threads=1).generate([1, 2], max_new_tokens=3).tokens) == 3


def test_a_name_that_is_no_text_is_one_sentence(tmp_path: Path, tiny: TinyModel) -> None:
    with writing_bundle(tmp_path / "b") as folder:
        write_networks(folder, tiny.described())
        file = folder / batch_file(segment_name(1))
        file.write_bytes(file.read_bytes().replace(b"slot_thresholds", b"slot_threshold\xce"))
        write_manifest(folder, tiny.manifest())
    with pytest.raises(BundleError, match=r"has no input slot_thresholds, which its manifest calls for"):
        load(tmp_path / "b")
