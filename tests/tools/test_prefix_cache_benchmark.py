"""`tools/benchmarks/prefix_cache.py` on a tiny bundle: every case is measured. No test looks at a time."""

import json
import sys
from pathlib import Path

import pytest
from tiny_engines import TinyLlama


def test_every_case_is_measured(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import prefix_cache

    file, few = tmp_path / "times.json", ["--tokens", "100", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["prefix_cache", str(tiny_llama.exact), *few, "--json", str(file)])
    assert prefix_cache.main() == 0
    seconds = json.loads(file.read_text())["seconds"]
    assert {case: len(values) for case, values in seconds.items()} == dict.fromkeys(
        (prefix_cache.READ, prefix_cache.CACHED, prefix_cache.TURN), 2
    )
    assert "sooner" in capsys.readouterr().out
