"""`tools/benchmarks/cpp_loop.py` on a small bundle: both runtimes are timed, over the same tokens, or it says why
not."""

import json
import sys
from pathlib import Path

import pytest
from cpp_builds import ROOT, CppBuild


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "benchmarks"))
    import cpp_loop as benchmark_cpp

    return benchmark_cpp


def run(tool, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--rounds", "2", "--new-tokens", "5"])
    return tool.main()


def test_both_are_timed(tool, cpp: CppBuild, tiny_bundle: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    assert run(tool, monkeypatch, tiny_bundle, cpp.program, "--json", tmp_path / "figures.json") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == set(tool.CASES)
    for by in figures.values():
        assert 0 < by[tool.INSIDE] < by[tool.PYTHON]
        assert by[tool.CPP] > 0
    assert "Python outside ONNX Runtime" in capsys.readouterr().out


def test_lists_are_timed(tool, cpp: CppBuild, demo_bundle: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    sizes = ["--sequences", "1,3", "--json", tmp_path / "figures.json"]
    assert run(tool, monkeypatch, demo_bundle, cpp.program, *sizes) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == ["full", "full, 3 in a batch", "exit at 0.5", "exit at 0.5, 3 in a batch"]
    for by in figures.values():
        assert 0 < by[tool.INSIDE] < by[tool.PYTHON]
        assert by[tool.CPP] > 0
    assert "Python over C++" in capsys.readouterr().out


def test_a_program_that_fails_or_differs_ends_it(tool, tiny_bundle: Path, tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "program"
    for script, sentence in [
        ("echo it is broken >&2; exit 2", "it is broken"),
        ('echo \'{"tokens": [1], "stats": {"decode_seconds": 1}}\'', "the two runtimes disagree about the tokens"),
    ]:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with pytest.raises(SystemExit, match=sentence):
            run(tool, monkeypatch, tiny_bundle, program)
