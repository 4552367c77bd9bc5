"""Opening a session: the provider asked for or a refusal; damaged graphs and those of another manifest are refused."""

import logging
from pathlib import Path

import onnx
import pytest
from tiny_model import TinyModel

from tide_export import names
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.errors import BundleError, ConfigError
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


def test_session_options_reach_onnxruntime(tiny_bundle: Path) -> None:
    options = load(tiny_bundle, threads=2).backend.session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "20"


def test_a_graph_that_is_not_onnx_is_one_sentence(tmp_path: Path, tiny: TinyModel) -> None:
    with writing_bundle(tmp_path / "b") as folder:
        (folder / names.GRAPH_FILE).write_bytes(b"not a graph")
        write_manifest(folder, tiny.manifest())
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot load '.*model\.onnx'") as error:
        load(tmp_path / "b")
    assert "\n" not in str(error.value)


def write_with_graph_of(path: Path, graph: TinyModel, manifest: TinyModel) -> Path:
    with writing_bundle(path) as folder:
        onnx.save(graph.graph(), folder / names.GRAPH_FILE)
        write_manifest(folder, manifest.manifest())
    return path


def test_a_graph_of_another_manifest_is_refused(tmp_path: Path, tiny: TinyModel) -> None:
    deeper = TinyModel(layers=7)
    with pytest.raises(BundleError, match=r"has no input past_key_values\.6\.key"):
        load(write_with_graph_of(tmp_path / "a", graph=tiny, manifest=deeper))
    with pytest.raises(BundleError, match=r"has the input past_key_values\.6\.key"):
        load(write_with_graph_of(tmp_path / "b", graph=deeper, manifest=tiny))
    full = TinyModel(checkpoints=())
    with pytest.raises(BundleError, match="has no input exit_thresholds"):
        load(write_with_graph_of(tmp_path / "c", graph=full, manifest=tiny))
