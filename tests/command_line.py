"""What the tests of the command line share."""

import pytest

from tide_export.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that must exit with 2 and print nothing else, but progress unless quiet."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as usage:
        code = usage.code
    out, err = capsys.readouterr()
    progress = () if "-q" in arguments else ("running", "reading", "loading")
    lines = [line for line in err.splitlines() if not line.startswith(progress)]
    assert code == 2, err
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("tide-export")
    assert "error: " in lines[0]
    assert "Traceback" not in err
    return lines[0]
