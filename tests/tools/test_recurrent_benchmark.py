"""`tools/benchmarks/recurrent.py` on a tiny bundle: every case is measured. No test looks at a time."""

import json
import sys
from pathlib import Path

import pytest
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import TinyLlama, bundle_of

from tide_export.routers.random_routers import random_routers

ECHO = """#!{python}
import json, sys
assert sys.argv[1:] == "-m peer.gguf -t 1 -p 0 -n 48 -r 3 -o json".split(), sys.argv
print(json.dumps([{{"avg_ts": 12.5}}]))
"""


def test_every_case_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_llama: TinyLlama
) -> None:
    import recurrent

    source = build("lfm2")
    routers = random_routers(source, CHECKPOINTS, list(range(5, 45)), bottleneck=16)
    bundle_of(source, routers, tmp_path / "bundle")
    peer, file = tmp_path / "llama-bench", tmp_path / "times.json"
    peer.write_text(ECHO.format(python=sys.executable))
    peer.chmod(0o755)
    options = [
        "--rounds",
        "2",
        "--threads",
        "1",
        "--llama-bench",
        str(peer),
        "--gguf",
        "peer.gguf",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["recurrent", str(tmp_path / "bundle"), *options])
    assert recurrent.main() == 0
    found = json.loads(file.read_text())
    assert {name: len(rates) for name, rates in found["tokens_per_second"].items()} == {"ours": 2, "llama.cpp": 2}
    assert {count: len(taken) for count, taken in found["seconds"].items()} == dict.fromkeys(
        map(str, recurrent.RUNS), 2
    )
    assert "over one" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["recurrent", str(tiny_llama.exact)])
    assert recurrent.main() == 1
