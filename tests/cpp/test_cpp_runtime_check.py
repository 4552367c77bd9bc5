"""`tools/checks/cpp_runtime.py` on a small bundle: equal, and what it says where something differs or fails."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cpp_builds import ROOT, CppBuild


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "checks"))
    import cpp_runtime as compare_cpp

    return compare_cpp


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--new-tokens", "6"])
    return tool.main()


def test_the_two_runtimes_agree(tool, cpp: CppBuild, tiny_bundle: Path, monkeypatch, capsys) -> None:
    assert run(tool, monkeypatch, tiny_bundle, cpp.program, "--provider", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(tool.CASES)
    assert all(" same; " in line for line in lines)


def test_another_token_or_count_is_told(tool, cpp: CppBuild, tiny_bundle: Path, monkeypatch, capsys, tmp_path) -> None:
    program = tmp_path / "program"
    done = subprocess.run(
        [cpp.program, tiny_bundle, "--ids", "1", "--max-new-tokens", "6", "--ignore-eos"],
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout) | {"tokens": [1] * 6}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(0o755)
    assert run(tool, monkeypatch, tiny_bundle, program, "--provider", "cpu") == 1
    assert "differs in tokens" in capsys.readouterr().out
    program.write_text("#!/bin/sh\necho it is broken >&2; exit 2\n")
    with pytest.raises(SystemExit, match="it is broken"):
        run(tool, monkeypatch, tiny_bundle, program)
