"""`tools/benchmarks/serve.py` on the demo bundle, against a second server of our own and one that does not start."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"


@pytest.fixture
def tool():
    import serve

    return serve


def results(**speeds: float) -> list[dict[str, Any]]:
    return [{"streams": 8, "case": case, "tokens_per_second": speed} for case, speed in speeds.items()]


@pytest.mark.parametrize(("ours", "best", "met"), [(131.0, 100.0, True), (129.0, 100.0, False)])
def test_the_goal_is_held_against_the_best_peer(tool, ours: float, best: float, met: bool) -> None:
    found = tool.goal(results(ours=ours, slow=10.0, fast=best), ["slow", "fast"])
    assert (found["against"], found["met"]) == ("fast", met)
    assert tool.goal(results(ours=ours), []) == {"against": None, "ratio": None, "met": False}


def test_a_mode_may_have_a_threshold(tool) -> None:
    assert tool.mode_options("full") == {"mode": "full"}
    assert tool.mode_options("exit:0.8") == {"mode": "exit", "threshold": 0.8}


def test_real_servers_are_loaded(
    tool, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    peer = [sys.executable, "-m", "tide_export.cli.main", "serve", str(demo_bundle), "--port", "{port}", "-q"]
    line = ["serve.py", demo_bundle, "--dataset", TEXT, "--streams", "1,2", "--requests", 1, "--rounds", 1]
    line += ["--threads", 1, "--tokens", 12, "--mode", "full", "--peer", f"twin={shlex.join(peer)}"]
    line += ["--temperature", 0.8]
    line += ["--peer", "missing=no-such-server", "--json", tmp_path / "r.json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in line])
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "OMITTED missing: no-such-server: No such file or directory" in out
    assert "NOT MEASURED at least 1.3x the tokens/s of the best peer at 8 streams" in out
    measured = json.loads((tmp_path / "r.json").read_text())
    cases = [(one["streams"], one["case"]) for one in measured["results"]]
    assert cases == [(streams, case) for streams in (1, 2) for case in ("tide-export, full", "twin")]
    for one in measured["results"]:
        gaps = [value for value in one["token_ms"] if value is not None]  # none on a busy machine: text in one piece
        assert min(one["tokens_per_second"], *one["first_ms"], *gaps) > 0
    assert measured["results"][1]["same_text"] > 0  # of sampled answers, which have the same seeds
    assert measured["temperature"] == 0.8
