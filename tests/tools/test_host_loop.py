"""`tools/benchmarks/host_loop.py` on a tiny bundle: every case is measured; what `--check` holds. No test looks at a
time."""

import json
import sys
from pathlib import Path

import pytest
from tiny_engines import TinyLlama


def test_every_case_is_measured(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import host_loop

    file, few = tmp_path / "times.json", ["--new-tokens", "5", "--rounds", "2", "--megabytes", "0,1"]
    monkeypatch.setattr(sys, "argv", ["host_loop", str(tiny_llama.exact), *few, "--json", str(file)])
    assert host_loop.main() == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["mode"], row["megabytes"]) for row in rows] == [
        (mode, size) for size in (0, 1) for mode in host_loop.MODES
    ]
    for row in rows:
        assert list(row["microseconds"]) == [host_loop.LIBRARY, host_loop.GENERATE, host_loop.STREAM]
        assert min(row["microseconds"].values()) > 0
    assert "Python's part" in capsys.readouterr().out


@pytest.mark.parametrize(("stream", "code"), [(10.9, 0), (11.1, 1)])
def test_the_goal_is_about_what_python_adds(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, stream: float, code: int
) -> None:
    import host_loop

    times = {host_loop.LIBRARY: 1.0, host_loop.GENERATE: 5.0, host_loop.STREAM: stream}
    monkeypatch.setattr(host_loop.Host, "microseconds", lambda self, way, mode: times[way])
    monkeypatch.setattr(sys, "argv", ["host_loop", str(tiny_llama.exact), "--rounds", "1", "--check"])
    assert host_loop.main() == code
