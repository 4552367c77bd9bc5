"""Weights that ONNX Runtime does not pack stay in the mapped file."""

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest

from tide_export import names
from tide_export.bundle.opened import open_bundle
from tide_export.errors import BundleError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.onnxruntime import bindings


def mappings(bundle: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{bundle}/{names.WEIGHTS_FILE}")


def test_engines_share_the_file_until_they_are_gone(wide_bundle: Path) -> None:
    engines = [load(wide_bundle, threads=1) for _ in range(2)]
    assert mappings(wide_bundle) == 2
    first = engines[0].generate([1, 2, 3], max_new_tokens=4).tokens
    del engines[0]
    gc.collect()
    assert mappings(wide_bundle) == 1
    assert engines[0].generate([1, 2, 3], max_new_tokens=4).tokens == first
    engines.clear()
    gc.collect()
    assert mappings(wide_bundle) == 0


@pytest.mark.parametrize("reason", ["a weight is read", "no temporary folder", "huge pages"])
def test_where_weights_cannot_be_shared_they_are_copied(
    wide_bundle: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(wide_bundle, threads=1).generate([1, 2, 3], max_new_tokens=4).tokens
    gc.collect()
    if reason == "huge pages":
        monkeypatch.setenv("TIDE_HUGE_PAGES", "1")
    else:

        def fail(*_: object) -> None:
            raise OSError("no space left")

        if reason == "no temporary folder":
            monkeypatch.setattr(bindings.tempfile, "TemporaryDirectory", fail)
        else:
            monkeypatch.setattr(bindings.Path, "touch", fail)
    engine = load(wide_bundle, threads=1, verify=False)
    assert mappings(wide_bundle) == 0
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == expected


def test_no_sequence_starts_on_weights_that_were_changed(wide_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(wide_bundle, tmp_path / "bundle")
    engine = load(bundle, threads=1)
    running = engine.start([2.0, 2.0])
    running.step([1])
    with (bundle / names.WEIGHTS_FILE).open("r+b") as stream:
        stream.write(np.ones(4, np.float32).tobytes())
    for refused in (lambda: engine.start([2.0, 2.0]), lambda: engine.generate([1], max_new_tokens=1)):
        with pytest.raises(BundleError, match=f"{names.WEIGHTS_FILE}' was changed after the bundle was loaded"):
            refused()


def test_a_graph_that_does_not_load_is_refused_all_the_same(wide_bundle: Path) -> None:
    opened = open_bundle(wide_bundle)
    engine = Engine(opened, None)
    with pytest.raises(BundleError, match=f"ONNX Runtime cannot load '{wide_bundle}/{names.GRAPH_FILE}'"):
        bindings.load_session(bindings.import_onnxruntime(), engine.bundle, names.GRAPH_FILE, 1, graph=b"no graph")
