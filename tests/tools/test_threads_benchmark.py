"""`tools/benchmarks/threads.py` on the demo bundle: every scene is measured; what `--check` holds against a result."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def tool():
    import threads as benchmark_waiting

    return benchmark_waiting


@pytest.mark.parametrize(
    ("alone", "elsewhere", "holds"), [(111, 91, True), (130, 100, True), (109, 100, False), (130, 89, False)]
)
def test_what_is_held_against_it(tool, alone: float, elsewhere: float, holds: bool) -> None:
    scenes = {scene: dict.fromkeys(tool.WAYS, 100.0) for scene in tool.SCENES}
    for scene, by in scenes.items():
        by[tool.OURS] = alone if scene == tool.ALONE else elsewhere
    assert tool.held({"tokens_per_second": scenes}) is holds


def test_every_scene_is_measured_on_a_real_engine(
    tool, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "WAYS", {tool.OURS: 20})  # one will do: every figure is a process
    monkeypatch.setattr(
        sys, "argv", ["x", str(demo_bundle), "--rounds", "1", "--seconds", "0.1", "--plot", str(tmp_path / "plot.png")]
    )
    assert tool.main() == 0
    shown = capsys.readouterr().out
    for scene in tool.SCENES:
        [line] = [line for line in shown.splitlines() if line.strip().startswith(f"{scene}  ")]
        assert float(line.split()[-1]) > 0
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_bundle_that_does_not_run_ends_it(tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--rounds", "1"])
    with pytest.raises(SystemExit, match="does `tide-export generate` run"):
        tool.main()
