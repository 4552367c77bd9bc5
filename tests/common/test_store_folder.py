"""The folder that outlives a run of the tests: where it is, what happens where it cannot be written, and its locks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import store as kept
from store import LEAST, ROOT, VARIABLE, locked, store


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is to be done at the end of the process."""
    calls = list[tuple]()
    monkeypatch.setattr(kept.atexit, "register", lambda *given, **options: calls.append((given, options)))
    return calls


def test_it_is_where_the_variable_says_else_below_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new" / "folder"))
    assert store() == tmp_path / "new" / "folder"
    assert list(store().iterdir()) == []
    monkeypatch.delenv(VARIABLE)
    assert store() == ROOT / "out" / "test-store"
    ignored = ["git", "check-ignore", "-q", str(store() / "any")]
    assert not (ROOT / ".git").exists() or subprocess.run(ignored, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("what", ["read-only", "a file", "full"])
def test_where_it_cannot_be_written_the_run_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    registered: list[tuple],
    what: str,
) -> None:
    (tmp_path / "file").touch()
    folder = {"read-only": Path("/proc/self"), "a file": tmp_path / "file", "full": tmp_path}[what]
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(kept.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kept, "LEAST", 1 << 80 if what == "full" else LEAST)
    temporary = store()
    assert temporary.is_relative_to(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: nothing is kept in {folder} for the next run of the tests: ")
    ((remove, path), _) = registered[0]
    remove(path)
    assert not temporary.exists()
    assert os.environ[VARIABLE] == str(temporary), "for the workers too"
    monkeypatch.setattr(kept, "LEAST", 0)
    assert store() == temporary
    assert capsys.readouterr().err == ""


ADDS = """
import sys, time
from pathlib import Path
from store import locked
file = Path(sys.argv[1])
for _ in range(20):
    with locked(file):
        number = int(file.read_text())
        file.write_text("")
        time.sleep(0.002)
        file.write_text(str(number + 1))
"""


def test_two_processes_hold_a_lock_by_turns(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("0")
    command = [sys.executable, "-c", ADDS, str(file)]
    both = [subprocess.Popen(command, cwd=Path(kept.__file__).parent) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert file.read_text() == "40"


def test_a_process_that_inherits_a_lock_holds_it(tmp_path: Path) -> None:
    """As a compiler does whose tests were killed: nobody else may write where it writes."""
    with locked(tmp_path / "build") as descriptor:
        compiler, begun = subprocess.Popen(["sleep", "0.3"], pass_fds=(descriptor,)), time.monotonic()
    with locked(tmp_path / "build"):
        assert time.monotonic() - begun > 0.25
    assert compiler.wait(timeout=60) == 0
