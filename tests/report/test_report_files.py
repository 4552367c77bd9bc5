"""Where a report can be written is checked beforehand, and there is a whole one or none."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import report_data

from tide_export.common import files
from tide_export.errors import ConfigError
from tide_export.report import plots
from tide_export.report.write import check_report_path, write_report


def test_a_good_path_leaves_nothing_behind(tmp_path):
    check_report_path(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "says"),
    [("r.pdf", "must end in .html"), ("r", "must end in .html"), ("none/r.html", "there is no folder")],
)
def test_a_bad_path_is_named(tmp_path, path, says):
    with pytest.raises(ConfigError, match=says) as error:
        check_report_path(tmp_path / path)
    assert str(tmp_path / path) in str(error.value)


@pytest.mark.parametrize("name", ["r.html", "r.png"])
def test_a_folder_in_the_way(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is a folder"):
        check_report_path(tmp_path / "r.html")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that not even root can write to is needed")
def test_a_folder_that_cannot_be_written_to():
    with pytest.raises(ConfigError, match="cannot be written to /proc/self"):
        check_report_path(Path("/proc/self/r.html"))


def test_the_path_is_checked_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("tide_export.report.write.investigate", lambda _: pytest.fail("it went to work"))
    with pytest.raises(ConfigError):
        write_report(report_data.make(n=100), tmp_path / "r.pdf")


def test_files_are_ordinary_ones(written):
    names = {"suitability.html", "suitability.png"}
    assert {file.name for file in written.parent.iterdir()} == names
    mask = os.umask(0)
    os.umask(mask)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask for file in written.parent.iterdir())


def test_an_old_report_is_replaced(tmp_path, unpictured):
    (tmp_path / "r.html").write_text("old")
    write_report(report_data.make(n=300), tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>\n")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_failure_while_drawing_leaves_the_old_one(tmp_path, unpictured, monkeypatch):
    (tmp_path / "r.html").write_text("old")
    monkeypatch.setattr(plots, "pngs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(report_data.make(n=300), tmp_path / "r.html")
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]
    assert (tmp_path / "r.html").read_text() == "old"


def test_a_full_disk_leaves_the_old_ones(tmp_path, monkeypatch, unpictured):
    for name in ("r.html", "r.png"):
        (tmp_path / name).write_text("old")
    write = files._write_new

    def full(path, data):
        if ".html" in path.name and data:
            write(path, data[:5])
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(files, "_write_new", full)
    with pytest.raises(ConfigError, match="no space left on the disk"):
        write_report(report_data.make(n=300), tmp_path / "r.html")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"r.html": "old", "r.png": "old"}


def test_pyplot_is_left_alone(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import matplotlib as m, report_data; from tide_export.report import write as report\n"
        "m.rcParams['axes.grid.axis'] = 'x'; m.rcParams['font.size'] = 7\n"
        "report.render = lambda *_: ''\n"  # the overview is drawn, six kinds of panels
        "report.write_report(report_data.make(n=100), Path(sys.argv[2]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert (m.rcParams['axes.grid.axis'], m.rcParams['font.size'], m.rcParams['axes.grid']) == ('x', 7, False)"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / "r.html")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
