"""`tools/benchmarks/soak.py` on the demo bundle: clients are killed, and what must be kept is."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"
KEPT = {"growth": 1.05, "cache_held": True, "still_running": 0.0, "same_answer": True}


def test_a_server_whose_clients_are_killed(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import soak

    line = ["soak.py", demo_bundle, "--dataset", TEXT, "--minutes", 0, "--requests", 1, "--streams", 4, "--tokens", 24]
    line += ["--kill-seconds", 0.5, "--threads", 1, "--prefix-cache-bytes", 1 << 22, "--json", tmp_path / "r.json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in line])
    assert soak.main() == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["kills"] >= 1
    assert result["samples"][-1]["requests"] >= 1
    assert soak.kept(result | {"growth": 1.0})  # seconds say nothing about memory
    assert "clients killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "broken", [{"growth": 1.2}, {"cache_held": False}, {"still_running": 1.0}, {"same_answer": False}]
)
def test_each_thing_that_is_not_kept_is_told(broken: dict[str, float]) -> None:
    import soak

    assert soak.kept(KEPT)
    assert not soak.kept(KEPT | broken)
