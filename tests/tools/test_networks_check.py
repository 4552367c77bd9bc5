"""`tools/checks/networks.py` on tiny networks: an engine that gives what the graph gives passes, another does not."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from bundles import with_manifest
from caller_networks import Run, callers_engine
from tiny_engines import TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD

FEW = ["--sequences", "1,2", "--new-tokens", "6", "--rounds", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    import networks

    return networks


@pytest.mark.parametrize("engine", ["cpu-networks", "torch"])
def test_engines_that_are_right_pass(check: ModuleType, tiny_llama: TinyLlama, tmp_path: Path, engine: str) -> None:
    file = tmp_path / "result.json"
    assert check.main([str(tiny_llama.exact), engine, *FEW, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [(row["mode"], row["sequences"]) for row in result["rows"]] == [
        (mode, count) for mode in ("full", "exit", "lossless") for count in (1, 2)
    ]
    assert all(row["equal"] == row["alone"] == row["tokens"] == 6 * row["sequences"] for row in result["rows"])
    assert len(result["steps"]["exits"]) > 1
    assert (result["engine"], result["wrong"]) == (engine, [])


def test_an_engine_that_is_wrong_fails(
    check: ModuleType, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, networks = callers_engine(open_bundle(tiny_llama.exact))

    def change(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if run[0] == HEAD:
            tensors[names.LOGITS][...] *= -1

    networks.after = change
    monkeypatch.setattr(check, "opened", lambda options: engine)
    assert check.main([str(tiny_llama.exact), "cpu-networks", *FEW]) == 1
    assert "DIFFERS: step 0: logits" in capsys.readouterr().out


def test_a_bundle_without_networks_is_refused(check: ModuleType, tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no segment networks"):
        check.main([str(with_manifest(tiny_llama.exact, tmp_path, networks=None)), "torch"])
