"""What the build backend asks for, compiles and calls its wheels, without compiling anything (test_wheel.py does)."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

sys.path.append(str(Path(__file__).parents[2] / "packaging"))

import tide_build
from tide_build import ROOT

NO_COMPILERS = {"PATH": "/nowhere", "CXX": ""}


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDE_WHEEL", "TIDE_CXXFLAGS", "CXX", "TENSORRT_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ziglang: bool = True) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tide_build, "find_spec", lambda name: ziglang or None)


@pytest.mark.parametrize(
    ("variables", "asked"),
    [({"CXX": "c++"}, False), (NO_COMPILERS, True), ({"CXX": "c++", "TIDE_WHEEL": "x86_64"}, True)],
)
def test_zig_is_asked_for_where_there_is_no_compiler_or_another_machine_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asked: bool
) -> None:
    given(monkeypatch, variables)
    for requires in (tide_build.get_requires_for_build_wheel, tide_build.get_requires_for_build_editable):
        assert (tide_build.ZIG in requires()) == asked
    assert tide_build.ZIG not in tide_build.get_requires_for_build_sdist()


ZIG = [sys.executable, "-m", "ziglang", "c++"]


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({"CXX": "ccache 'my c++' -m64"}, ["ccache", "my c++", "-m64"]),
        (NO_COMPILERS, ZIG),
        ({"CXX": "c++", "TIDE_WHEEL": "aarch64"}, [*ZIG, "-target", "aarch64-linux-gnu.2.28"]),
    ],
)
def test_the_compiler(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], command: list[str]) -> None:
    given(monkeypatch, variables)
    assert tide_build.compiler() == command


@pytest.mark.parametrize("variables", [NO_COMPILERS, {"TIDE_WHEEL": "x86_64"}])
def test_without_a_compiler_it_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    given(monkeypatch, variables, ziglang=False)
    with pytest.raises(SystemExit, match=r"needs a C\+\+17 compiler: install"):
        tide_build.compiler()


def compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[str]]:
    """The commands that build the library, none of which runs."""
    commands = list[list[str]]()

    def note(command: list[str]) -> None:
        commands.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(tide_build, "_run", note)
    tide_build.build(folder / "new" / "libtide.so", folder / "temporary", "1.2.3")
    assert [path.name for path in (folder / "new").iterdir()] == ["libtide.so"]
    return commands


@pytest.mark.parametrize("tensorrt", [False, True])
def test_every_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tensorrt: bool) -> None:
    given(monkeypatch, {"CXX": "c++"} | ({"TENSORRT_ROOT": "/trt"} if tensorrt else {}))
    commands = compiled(monkeypatch, tmp_path)
    *compiling, linking = commands
    unity = (tmp_path / "temporary" / "runtime.cpp").read_text()
    runtime = [Path(line.split('"')[1]) for line in unity.splitlines()]
    sources = [Path(command[command.index("-c") + 1]) for command in compiling]
    every = {path for folder in ("src", "ops") for path in (ROOT / "cpp" / folder).rglob("*.cpp")}
    left_out = {"no_tensorrt.cpp"} if tensorrt else {"flavours.cpp", "kernel_cache.cpp", "trt_networks.cpp"}
    assert sorted([*runtime, *(path for path in sources if path.name != "runtime.cpp")]) == sorted(
        path for path in every if path.name not in left_out
    )
    assert set(linking) >= {command[-1] for command in compiling}
    for command in compiling:
        assert ("/trt/include" in command) == (tensorrt and "runtime.cpp" in command[command.index("-c") + 1])
        assert {"-std=c++17", "-fPIC", "-fvisibility=hidden", '-DTIDE_EXPORT_VERSION="1.2.3"'} <= set(command)
    assert every <= set(tide_build.depends())


def test_a_library_needs_no_c_library_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """zig links it statically; a development build keeps its symbols."""
    given(monkeypatch, {"CXX": "c++"})
    assert {"-static-libstdc++", "-static-libgcc", "-s"} <= set(compiled(monkeypatch, tmp_path)[-1])
    monkeypatch.setenv("TIDE_CXXFLAGS", "-g -fsanitize=address")
    *compiling, linking = compiled(monkeypatch, tmp_path)
    assert all({"-g", "-fsanitize=address"} <= set(command) for command in (*compiling, linking))
    assert "-s" not in linking
    given(monkeypatch, {"TIDE_WHEEL": "x86_64"})
    assert not {"-static-libstdc++", "-static-libgcc"} & set(compiled(monkeypatch, tmp_path)[-1])


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    found = dict[str, Any]()
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return found


@pytest.mark.parametrize("machine", tide_build.WHEELS)
def test_a_wheel_is_for_any_python_of_the_machine_that_is_named(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setenv("TIDE_WHEEL", machine)
    wheel = setup["cmdclass"]["bdist_wheel"](setuptools.Distribution())
    assert wheel.get_tag() == ("py3", "none", f"manylinux_2_28_{machine}")
    monkeypatch.setenv("TIDE_WHEEL", "sparc")
    with pytest.raises(SystemExit, match="TIDE_WHEEL must be one of x86_64, aarch64, not 'sparc'"):
        wheel.get_tag()


@pytest.mark.parametrize(
    ("newer", "variables", "builds"),
    [(True, {}, False), (False, {}, True), (True, {"TIDE_WHEEL": "aarch64"}, True), (None, {}, True)],
)
def test_the_library_is_built_where_it_is_older_than_a_source(
    setup: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    newer: bool | None,
    variables: dict[str, str],
    builds: bool,
) -> None:
    """And where there is none; and always for another machine, whose library it may be."""
    given(monkeypatch, variables)
    calls = list[Path]()
    build = setup["cmdclass"]["build_ext"](setuptools.Distribution(setup | {"name": "tide_export"}))
    build.build_lib, build.build_temp, build.inplace = str(tmp_path), str(tmp_path / "temporary"), False
    (extension,) = build.distribution.ext_modules
    build.ext_map = {extension.name: extension}
    monkeypatch.setattr(build, "get_ext_fullpath", lambda name: str(tmp_path / build.get_ext_filename(name)))
    monkeypatch.setattr(tide_build, "build", lambda target, folder, version: calls.append(target))
    target = tmp_path / "tide_export" / "runtime" / "libtide.so"
    if newer is not None:
        target.parent.mkdir(parents=True)
        target.touch()
        time = max(path.stat().st_mtime for path in tide_build.depends()) + (1 if newer else -1)
        os.utime(target, (time, time))
    build.build_extension(extension)
    assert calls == [target] * builds
