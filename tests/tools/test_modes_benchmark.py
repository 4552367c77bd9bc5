"""`tools/benchmarks/modes.py` on the demo bundle: every mode gets a row, and what they say is what the engine does."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"


@pytest.fixture(scope="module")
def modes():
    import modes

    return modes


def test_rows_and_files(modes, demo_bundle: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    options = ["--prompts", "4", "--new-tokens", "12", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["modes", str(demo_bundle), "--dataset", str(TEXT), *options])
    assert modes.main() == 0
    rows = json.loads((tmp_path / "modes.json").read_text())
    assert [row["mode"] for row in rows] == ["full", *["exit"] * 6, *["static"] * 3, "lossless"]
    full, *exits = [row for row in rows if row["mode"] in ("full", "exit")]
    assert (full["changed"], full["layers"], full["speedup"]) == (0.0, 12.0, 1.0)
    by_threshold = [row["layers"] for row in exits[:5]]
    assert by_threshold == sorted(by_threshold)  # a higher threshold never runs fewer layers
    assert next(row["layers"] for row in rows if row["mode"] == "static") < 6
    assert rows[-1]["changed"] == 0.0
    changed = [row["changed"] for row in exits[:5]]
    assert changed[0] > changed[-1]
    said = capsys.readouterr().out
    assert "static" in said
    assert "4 prompts of 48 tokens" in said


def test_another_token_in_lossless_mode_is_a_failure(modes, demo_bundle: Path, tmp_path, monkeypatch) -> None:
    seen = modes.Seen(0.1, 1.0, 1.0)
    monkeypatch.setattr(modes, "generate", lambda engine, mode, options, prompt, text: iter([seen]))
    options = ["--prompts", "2", "--new-tokens", "3", "--threads", "1", "--temperature", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["modes", str(demo_bundle), "--dataset", str(TEXT), *options])
    assert modes.main() == 1
