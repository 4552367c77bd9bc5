"""Native builds in the store: nothing is made twice, and what an interrupted or another build has left is made anew."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from native_builds import ROOT, BuildFailed, Builds, need
from store import VARIABLE

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES NONE)
add_custom_command(OUTPUT made DEPENDS ${CMAKE_SOURCE_DIR}/source COMMAND sh ${CMAKE_SOURCE_DIR}/source > made)
add_custom_target(tiny ALL DEPENDS made)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    need(shutil.which("cmake") is not None, "there is no cmake")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "source").write_text("echo once\n")
    return folder


def change(project: Path, script: str) -> None:
    (project / "source").write_text(f"{script}\n")
    os.utime(project / "source", (time.time() + 2, time.time() + 2))  # later than what was made, by any clock


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builds:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store"))
    return Builds()


def made(builds: Builds, project: Path) -> Path:
    return builds.make("tiny", ["-S", str(project)]) / "made"


def test_only_what_is_out_of_date_is_made(builds: Builds, project: Path) -> None:
    first = made(builds, project).stat()
    assert made(builds, project).stat().st_mtime_ns == first.st_mtime_ns
    change(project, "echo twice")
    assert made(builds, project).read_text() == "twice\n"


def test_what_cannot_be_built_is_told_and_tried_again(builds: Builds, project: Path) -> None:
    change(project, "exit 7")
    for _ in range(2):
        with pytest.raises(BuildFailed, match=r"--target all(.|\n)*Error 7"):
            made(builds, project)
    change(project, "echo mended")
    assert made(builds, project).read_text() == "mended\n"


def test_a_folder_of_another_source_or_version_is_made_anew(builds: Builds, project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(project, other)
    made(builds, other)
    for damage in ("", "CMAKE_CACHEFILE_DIR:INTERNAL=/elsewhere\n"):
        (builds.folder / "tiny" / "made").write_text("of another")
        if damage:
            (builds.folder / "tiny" / "CMakeCache.txt").write_text(damage)
        assert made(builds, project).read_text() == "once\n"


BUILDS = """
import sys
from native_builds import Builds
Builds().make("tiny", ["-S", sys.argv[1]])
"""


def test_a_killed_build_is_made_anew_when_its_compilers_have_ended(builds: Builds, project: Path) -> None:
    change(project, "echo half; touch begun; sleep 0.5")
    process = subprocess.Popen([sys.executable, "-c", BUILDS, str(project)], cwd=ROOT / "tests")
    folder = builds.folder / "tiny"
    while not (folder / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    begun = time.monotonic()
    (folder / "left").touch()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with builds.building("tiny"):
        assert time.monotonic() - begun > 0.4
        assert not folder.exists()
    change(project, "echo whole")
    assert made(builds, project).read_text() == "whole\n"
    assert not (folder / "left").exists()


def test_what_is_made_once_is_made_when_it_depends_on_something_else(builds: Builds, tmp_path: Path) -> None:
    source, calls = tmp_path / "source", list[Path]()

    def make(folder: Path) -> None:
        assert list(folder.iterdir()) == [], "nothing is left of another"
        (folder / "half").touch()
        calls.append(folder)
        if source.read_text() == "bad":
            raise BuildFailed

    for number, text in enumerate(("a", "a", "b", "bad"), 1):
        source.write_text(text)
        if text == "bad":
            for _ in range(2):
                with pytest.raises(BuildFailed):
                    builds.once("one", ["options", source], make)
        else:
            assert (builds.once("one", ["options", source], make) / "half").exists()
            assert len(calls) == number - (number > 1)
    assert len(calls) == 4
    source.write_text("b")
    builds.once("one", ["other options", source], make)
    assert len(calls) == 5
