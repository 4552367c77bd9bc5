"""A run fails if a test skips that is not listed, and says so; the list names what there is."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from known_skips import LIST, Group, check, groups

ROOT = Path(__file__).parents[2]
GROUPS = [
    Group("gpu", "a GPU", ("no GPU here", "no driver"), {"tests/gpu/test_a.py": 2, "tests/gpu/test_b.py": None}),
    Group("compilers", "a compiler", ("there is no g++",), {"tests/plugins/": 1}),
]
ONE, OTHER = ("tests/gpu/test_a.py::test_one[a::b]", "no GPU here (35)"), ("tests/gpu/test_a.py::test_two", "no driver")


def test_what_is_listed_may_skip() -> None:
    compiler = ("tests/plugins/sub/test_c.py::test_three", "there is no g++")
    many = [(f"tests/gpu/test_b.py::test_{n}", "no GPU here") for n in range(9)]
    wrong, counts = check([ONE, OTHER, compiler, *many], GROUPS)
    assert (wrong, counts) == ([], {"gpu": 11, "compilers": 1})
    assert check([], GROUPS) == ([], {})


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("tests/gpu/test_c.py::test_one", "no GPU here"),
        ("tests/gpu/test_a.py::test_one", "there is no g++"),
        ("tests/gpu/test_a.py::test_one", "really no GPU here"),
        ("tests/pluginsmith/test_c.py::test_one", "there is no g++"),
    ],
)
def test_what_is_not_listed_is_told(test: str, reason: str) -> None:
    wrong, counts = check([(test, reason), ONE], GROUPS)
    assert wrong == [f"{test} skips, which known_skips.toml does not list: {reason}"]
    assert counts == {"gpu": 1}


def test_more_than_are_listed_are_told() -> None:
    wrong, _ = check([ONE, OTHER, ("tests/gpu/test_a.py::test_new", "no GPU here")], GROUPS)
    assert wrong == ["3 tests of tests/gpu/test_a.py skip, of which known_skips.toml lists 2 ([gpu])"]


def test_the_list_names_what_there_is() -> None:
    known = groups()
    assert len(known) > 5
    for group in known:
        assert group.runs_on
        assert group.reasons
        for place, most in group.tests.items():
            assert (ROOT / place).exists(), f"[{group.name}] of {LIST.name} names {place}"
            assert (ROOT / place).is_dir() == place.endswith("/")
            assert most is None or most > 0


CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
import known_skips

def pytest_configure(config):
    config.pluginmanager.register(known_skips.KnownSkips())
"""
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(2))
def test_listed(number):
    pytest.skip("there is no nvcc")

@pytest.mark.xfail(reason="not a skip")
def test_fails():
    assert False

@pytest.mark.skipif({condition}, reason="I would rather not")
def test_skips():
    pass
"""


@pytest.mark.parametrize(
    ("workers", "unlisted"), tiers.exhaustive_beyond(2, [(0, False), (2, True), (0, True), (2, False)])
)
def test_a_run_with_others_fails(tmp_path: Path, workers: int, unlisted: bool) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(LIST.parent)))
    (folder / "test_some.py").write_text(TESTS.format(condition=unlisted))
    if unlisted:
        (folder / "test_none.py").write_text("import pytest\npytest.skip('all of it', allow_module_level=True)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == int(unlisted), done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "known_skips.toml does not list" in line]
    others = ["tests/test_none.py skips", "tests/test_some.py::test_skips skips"] if unlisted else []
    assert sorted(line.partition(", which")[0] for line in told) == others
    assert "skipped, as known_skips.toml lists: 2 compilers" in done.stdout
