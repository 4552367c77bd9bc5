"""Whatever the command line is given, it ends with exit code 0 or 2 and one sentence on stderr, never a traceback."""

import argparse
import contextlib
import io
from collections.abc import Iterator

import pytest
from fuzz.settings import cases
from hypothesis import given
from hypothesis import strategies as st

from tide_export.cli.main import main
from tide_export.cli.options import build_parser

COMMANDS = ("generate", "inspect", "bench", "tune", "calibrate", "export")
CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=("Cs",))
RAW_BYTES = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)  # of an argument that is not UTF-8
TEXT = st.text(CHARACTERS | RAW_BYTES, max_size=6)
NUMBERS = [
    "0",
    "-1",
    "1",
    "1.5",
    "2147483648",
    "9" * 30,
    "9" * 5000,
    "1e400",
    "nan",
    "inf",
    "-inf",
    "1,2",
    "3,,",
    "0.5,nan",
]
WORDS = [
    "auto",
    "yes",
    "no",
    "",
    "full",
    "exit",
    "lossless",
    "cpu",
    "tensorrt",
    "fp32",
    "int8",
    "onnxruntime",
    "a\nb",
    "--",
    "-q",
]
VALUES = (
    st.sampled_from(NUMBERS)
    | st.sampled_from(WORDS)
    | st.sampled_from(["FOLDER", "FILE", "GONE", "DEVICE", "LONG"])
    | TEXT
)
SUBPARSERS = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with options of its parser, most of them with a value, in any order."""
    command = draw(st.sampled_from(COMMANDS))
    words = [command, *draw(st.lists(VALUES, min_size=1, max_size=2))]
    actions = [action for action in SUBPARSERS[command]._actions if action.option_strings]
    required = [action for action in actions if action.required]
    for action in [*required, *draw(st.lists(st.sampled_from(actions), max_size=4))]:
        if {"--debug", "--help", "--help-all"} & {*action.option_strings}:
            continue
        words.append(draw(st.sampled_from(action.option_strings)))
        if action.nargs != 0 and draw(st.integers(0, 9)):
            value = str(draw(st.sampled_from(sorted(map(str, action.choices))))) if action.choices else draw(VALUES)
            words.append(value)
    return [word for word in words if word != "--debug"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files and folders of every kind but the right one."""
    folder = tmp_path_factory.mktemp("paths")
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("text\n")
    return {
        "FOLDER": str(folder / "empty"),
        "FILE": str(folder / "file.txt"),
        "GONE": str(folder / "gone"),
        "DEVICE": "/dev/null",
        "LONG": "x" * 5000,
    }


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """A word that is no path may be a model of the hub: it is not tried for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@cases(150, 1000)
@given(command_lines())
def test_a_command_line(paths: dict[str, str], words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([paths.get(word, word) for word in words])
        except SystemExit as usage:
            code = usage.code
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("reading ")]
    assert code == 2, err.getvalue()
    assert len(lines) == 1, err.getvalue()
    assert lines[0].startswith("tide-export")
    assert "error: " in lines[0]
    assert out.getvalue() == ""
