"""A wheel with the C++ runtime in it: built from an installed one, and linked by a program in C."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cpp_builds import ROOT, SANITIZE, CppBuild, onnxruntime_library, run

import tide_export

MAIN = "#include <stdio.h>\n#include <tide/tide.h>\nint main(void) { return puts(tide_version()) < 0; }\n"
LISTS = """cmake_minimum_required(VERSION 3.16)
project(version LANGUAGES C)
find_package(tide_runtime REQUIRED)
add_executable(version main.c)
target_link_libraries(version PRIVATE tide::tide)
"""


def built(prefix: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A wheel in `folder`, from a copy: setuptools writes beside what it reads; without the operators, whose compiling
    takes most of the time and is tested with the wheel that has no runtime."""
    ignored = shutil.ignore_patterns(".*", "build", "out", "__pycache__", "*.egg-info", "tests", "docs", "demo")
    shutil.copytree(ROOT, folder / "checkout", ignore=ignored)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    environment = os.environ | {"TIDE_CPP_PREFIX": str(prefix), "CC": "false", "CXX": "false"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder / "checkout",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(bool(SANITIZE), reason="a program in C would need the sanitizer too")
def test_a_wheel_with_the_runtime(cpp: CppBuild, tmp_path: Path) -> None:
    done = built(cpp.prefix, tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"tide_export-{tide_export.__version__}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    native, project = tmp_path / "site" / "tide_export" / "native", tmp_path / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(LISTS)
    (project / "main.c").write_text(MAIN)
    options = [f"-DCMAKE_PREFIX_PATH={native}", f"-DONNXRUNTIME_LIBRARY={onnxruntime_library()}"]
    run(["cmake", "-S", str(project), "-B", str(project / "build"), *options])
    run(["cmake", "--build", str(project / "build")])
    link = project / "build" / "onnxruntime"
    folder = link if link.is_dir() else onnxruntime_library().parent
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    program = [project / "build" / "version"]
    said = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.strip() == tide_export.__version__


def test_a_folder_without_a_runtime_is_refused(tmp_path: Path) -> None:
    done = built(tmp_path / "nothing", tmp_path)
    assert done.returncode == 1
    assert f"TIDE_CPP_PREFIX is '{tmp_path}/nothing', but there is no include/tide/tide.h in it" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []
