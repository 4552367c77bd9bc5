"""Functions that run in a process with limits: results, errors, and what ends one call without spoiling the next."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tide_export.runtime.limited import LimitedProcess, LimitError


class Interrupt(BaseException):
    """As KeyboardInterrupt, of a signal handler."""


@pytest.fixture
def numbers() -> Iterator[LimitedProcess]:
    process = LimitedProcess("operator", 20, memory=200 << 20)
    yield process
    process.close()


def test_results_and_errors(numbers: LimitedProcess) -> None:
    assert numbers.call("add", 1, 2) == 3
    with pytest.raises(ValueError, match=r"^division by zero$"):
        numbers.call("truediv", 1, 0)
    with pytest.raises(ValueError, match="has no attribute 'nothing'"):
        numbers.call("nothing")
    assert numbers.call("mul", "ä", 2) == "ää"


def test_a_process_that_ended_is_started_again(numbers: LimitedProcess) -> None:
    assert numbers.call("add", 1, 2) == 3
    assert numbers._process is not None
    os.kill(numbers._process.pid, signal.SIGKILL)
    numbers._process.wait()
    assert numbers.call("add", 1, 2) == 3
    with pytest.raises(LimitError, match=r"^needs more than 200 MiB of memory, or crashes$"):
        numbers.call("mul", "x", 1 << 40)
    with pytest.raises(LimitError, match=r"^takes longer than 0.2 s$"):
        numbers.call("pow", 3, 10**9, seconds=0.2)
    assert numbers.call("add", 1, 2) == 3


def test_an_interrupted_call_spoils_no_other(numbers: LimitedProcess) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    assert numbers.call("add", 1, 2) == 3
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupt):
            numbers.call("pow", 3, 10**9)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert numbers.call("add", 2, 2) == 4


def test_a_forked_process_has_one_of_its_own(numbers: LimitedProcess) -> None:
    assert numbers.call("add", 1, 2) == 3
    child = os.fork()
    if child == 0:
        same = numbers.call("add", 3, 4) == 7
        numbers.close()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert numbers.call("add", 5, 6) == 11


def test_the_current_folder_is_no_place_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stranger's file may lie."""
    (tmp_path / "operator.py").write_text("add = lambda a, b: 'forged'")
    (tmp_path / "json.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    process = LimitedProcess("operator", 20)
    assert process.call("add", 1, 2) == 3
    process.close()
