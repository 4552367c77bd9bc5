"""Targets of fuzzing by coverage (targets.py): the kept inputs, and in `make test-all` seconds of new ones.

TIDE_FUZZ_SECONDS fuzzes each target that long, and adds what reached more to seeds/. TIDE_FUZZ_INPUT names a file that
is tried alone.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from native_builds import Builds, need
from store import ROOT, store
from targets import TARGETS, Given

sys.path.append(str(ROOT / "packaging"))

import tide_build

from tide_export.common.version import __version__

FUZZ = Path(__file__).parent
SEEDS = FUZZ / "seeds"
SECONDS = os.environ.get("TIDE_FUZZ_SECONDS")
INPUT = os.environ.get("TIDE_FUZZ_INPUT")
USUAL_SECONDS = 12
IN_MEMORY = Path("/dev/shm")  # the files that a target writes for each input
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-O1"]
INCLUDES = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp' / 'src'}"]
# What is undefined traps, which libFuzzer takes for a crash.
COUNTED = "-O1 -fsanitize-coverage=trace-pc,trace-cmp -fsanitize=undefined -fsanitize-undefined-trap-on-error"
COUNTED += " -fno-sanitize=vptr -D_GLIBCXX_ASSERTIONS"


def seeds_of(target: str) -> dict[str, bytes]:
    if INPUT:
        return {INPUT: Path(INPUT).read_bytes()}
    kept = {path.name: path.read_bytes() for path in sorted((SEEDS / target).iterdir())}
    return kept | {f"made {number}": seed for number, seed in enumerate(TARGETS[target].seeds())}


@pytest.fixture(scope="session")
def json_reader() -> Path:
    """The library of json_reader.cpp."""
    need(shutil.which("g++") is not None, "there is no g++")
    sources = [FUZZ / "json_reader.cpp", ROOT / "cpp/src/bundle/json.cpp", ROOT / "cpp/src/formatting.cpp"]

    def make(folder: Path) -> None:
        command = ["g++", *FLAGS, *INCLUDES, "-shared", *map(str, sources), "-o", str(folder / "reader.so")]
        subprocess.run(command, check=True)

    return Builds().once("fuzz-json", [*sources, ROOT / "cpp/src/bundle/json.h"], make) / "reader.so"


@pytest.fixture(scope="session")
def counted_library() -> Path:
    """The package's library, which counts what it runs (counters.c), with json_reader.cpp in it."""
    need(shutil.which("g++") is not None, "there is no g++")
    counters, reader = FUZZ / "counters.c", FUZZ / "json_reader.cpp"

    def make(folder: Path) -> None:
        objects = [folder / "counters.o", folder / "reader.o"]
        subprocess.run(["gcc", "-O2", "-fPIC", "-c", counters, "-o", objects[0]], check=True)
        subprocess.run(["g++", *FLAGS, *INCLUDES, "-c", reader, "-o", objects[1]], check=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", "g++")
            patch.delenv("TENSORRT_ROOT", raising=False)
            patch.setenv("TIDE_CXXFLAGS", " ".join([COUNTED, *map(str, objects)]))
            tide_build.build(folder / "libtide.so", folder / "parts", __version__)
        shutil.rmtree(folder / "parts")

    return Builds().once("fuzz-library", [*tide_build.depends(), counters, reader, COUNTED], make) / "libtide.so"


@pytest.fixture
def working() -> Iterator[str]:
    """A folder in memory, where there is one."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        yield folder


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs(target: str, json_reader: Path, tiny_llama, tmp_path: Path) -> None:
    with contextlib.ExitStack() as after:
        check = TARGETS[target].make(Given(tmp_path, json_reader, tiny_llama.exact, after))
        for name, data in seeds_of(target).items():
            try:
                check(data)
            except Exception as error:
                raise AssertionError(f"{target}: {name} fails: {error}") from error


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs(target: str, counted_library: Path, tiny_llama, working: str, tmp_path: Path) -> None:
    found, made, kept = tmp_path / "found", tmp_path / "made", SEEDS / target
    crashes = store() / "fuzz"
    for folder in (found, made, crashes):
        folder.mkdir(exist_ok=True)
    for number, seed in enumerate(TARGETS[target].seeds()):
        (made / str(number)).write_bytes(seed)

    paths = os.pathsep.join([str(FUZZ.parent), str(FUZZ), os.environ.get("PYTHONPATH", str(ROOT))])
    needed = {"TARGET": target, "LIBRARY": str(counted_library), "BUNDLE": str(tiny_llama.exact)}
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": working}
    environment |= {f"TIDE_FUZZ_{name}": value for name, value in needed.items()}

    def fuzz(*options: object) -> None:
        own = ["-timeout=20", f"-artifact_prefix={crashes}/{target}-"]
        command = [sys.executable, str(FUZZ / "guided.py"), *own, *map(str, options)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not line.startswith("INFO: Instrumenting")]
            file = next(iter(re.findall(r"Test unit written to (\S+)", done.stderr)), INPUT)
            again = f"TIDE_TEST_ALL=1 TIDE_FUZZ_INPUT={file} pytest {Path(__file__).relative_to(ROOT)} -k {target}"
            pytest.fail("\n".join([*said[-40:], "", f"{target} fails, and again by: {again}"]))

    if INPUT:
        fuzz(INPUT)
        return
    fuzz(f"-max_total_time={SECONDS or USUAL_SECONDS}", found, kept, made)
    if SECONDS:
        fuzz("-set_cover_merge=1", "-use_counters=0", kept, made, found)  # as few as run what these run
