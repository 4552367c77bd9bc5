"""`tools/benchmark_modes.py` on the demo bundle: every mode gets a row, and what they say is what the engine does."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl"


@pytest.fixture(scope="module")
def benchmark_modes():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import benchmark_modes
    finally:
        sys.path.pop(0)
    return benchmark_modes


def test_rows_and_files(benchmark_modes, demo_bundle: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    options = ["--prompts", "4", "--new-tokens", "12", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmark_modes", str(demo_bundle), "--dataset", str(TEXT), *options])
    assert benchmark_modes.main() == 0
    rows = json.loads((tmp_path / "modes.json").read_text())
    assert [row["mode"] for row in rows] == ["full", *["exit"] * 6, *["static"] * 3, "lossless"]
    full, *exits = [row for row in rows if row["mode"] in ("full", "exit")]
    assert (full["agreement"], full["layers"], full["speedup"]) == (1.0, 12.0, 1.0)
    by_threshold = [row["layers"] for row in exits[:5]]
    assert by_threshold == sorted(by_threshold)  # a higher threshold never runs fewer layers
    assert next(row["layers"] for row in rows if row["mode"] == "static") < 6
    assert rows[-1]["agreement"] == 1.0
    assert (tmp_path / "modes.png").stat().st_size > 10_000
    assert "static" in (tmp_path / "modes.md").read_text()
    assert "4 prompts of 48 tokens" in capsys.readouterr().out


def test_several_together(
    benchmark_modes, demo_bundle: Path, propagating_bundle: Path, tmp_path: Path, monkeypatch
) -> None:
    """A batch keeps the tokens that one by one keeps, of both kinds of K/V cache, and the same passes where nothing
    waits."""
    options = ["--prompts", "5", "--new-tokens", "8", "--threads", "1", "--together", "2", "--thresholds", "0.5"]
    bundles = [str(demo_bundle), str(propagating_bundle)]
    arguments = ["benchmark_modes", *bundles, "--dataset", str(TEXT), "--modes", "exit", *options]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path)])
    assert benchmark_modes.main() == 0
    rows = json.loads((tmp_path / "modes.json").read_text())
    assert len(rows) == 11
    alone = {(r["bundle"], r["setting"]): r for r in rows if r["mode"] == "exit" and r["together"] == 1}
    for row in rows:
        if row["mode"] == "full":
            assert (row["agreement"], row["layers"]) == (1.0, 12.0)
        elif row["together"] == 2:
            one = alone[row["bundle"], row["setting"]]
            assert (row["agreement"], row["layers"]) == (one["agreement"], one["layers"])
            assert row["speedup"] != one["speedup"]
    assert "4 prompts of 48 tokens" in (tmp_path / "modes.md").read_text()


def test_another_token_in_lossless_mode_is_a_failure(benchmark_modes, demo_bundle: Path, tmp_path, monkeypatch) -> None:
    seen = benchmark_modes.Seen(0.9, 1.0, 1.0)
    monkeypatch.setattr(benchmark_modes, "generate", lambda engine, mode, prompt, said: seen)
    options = ["--prompts", "2", "--new-tokens", "3", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmark_modes", str(demo_bundle), "--dataset", str(TEXT), *options])
    assert benchmark_modes.main() == 1
