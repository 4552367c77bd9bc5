"""What must be set before PyTorch is loaded: by the command line for itself, never against the user."""

import os
from pathlib import Path

import pytest

from tide_export.cli import torch_environment as environment
from tide_export.cli.main import main
from tide_export.cli.torch_environment import prepare

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what `prepare` sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "HUGE_PAGES", tmp_path)


def test_threads_wait_briefly_and_tensors_ask_for_huge_pages() -> None:
    prepare()
    assert [os.environ.get(name) for name in NAMES] == [None, "1000", "1"]


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    prepare()
    set_ = {key: os.environ[key] for key in NAMES if key in os.environ}
    assert set_ == {name: value, "THP_MEM_ALLOC_ENABLE": "0"}


def test_a_kernel_without_huge_pages_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "HUGE_PAGES", tmp_path / "none")
    prepare()
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ


def test_the_command_line_prepares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
