"""What a wheel and the sdist hold, that the wheel runs a bundle, and the versions that are accepted and pinned."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tide_export
from tide_export.runtime.native import LIBRARY

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# pip must reach an index; .ci/run sets this, so that there a failure is one.
REQUIRED = "TIDE_REQUIRE_INDEX"
PROMPT, NEW_TOKENS = [1, 2, 3, 4], 12
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
NATIVE = ("cpp", "plugins", "cmake")
# The interpreter's own path must not lead back to the checkout.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command: object, cwd: Path, environment: Mapping[str, str] | None = None) -> "CompletedProcess[str]":
    words = [str(word) for word in command]
    variables = ENVIRONMENT | dict(environment or {})
    return subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False)


def pip(*arguments: object, cwd: Path, environment: Mapping[str, str] | None = None) -> None:
    done = run(sys.executable, "-m", "pip", "--retries", "1", *arguments, cwd=cwd, environment=environment)
    if done.returncode and REQUIRED not in os.environ and "No matching distribution" in done.stderr:
        pytest.skip("pip reaches no index")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: setuptools writes beside what it reads."""
    ignored = shutil.ignore_patterns(".*", "build", "out", "demo", "tests", "__pycache__", "*.egg-info", LIBRARY.name)
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("packaging") / "checkout", ignore=ignored))


def backend(checkout: Path, call: str, **environment: str) -> None:
    """Calls the build backend, as pip does."""
    code = f"import sys; sys.path.insert(0, 'packaging'); import tide_build; tide_build.{call}"
    done = run(sys.executable, "-c", code, cwd=checkout, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def sdist(checkout: Path) -> Path:
    backend(checkout, f"build_sdist({str(checkout.parent)!r})")
    (path,) = checkout.parent.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def assembled(checkout: Path) -> Path:
    """A wheel of the library that this checkout has: nothing is compiled, as it is newer than its sources."""
    folder = checkout / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    target = folder / LIBRARY.relative_to(ROOT)
    target.parent.mkdir(parents=True)
    shutil.copyfile(LIBRARY, target)
    backend(checkout, f"build_wheel({str(checkout.parent)!r})", CXX="no-compiler")
    (path,) = checkout.parent.glob("*.whl")
    return path


def compiled(sdist: Path, machine: str, flags: str = "") -> Path:
    """A wheel built from the sdist, as by pip where there is no wheel: by zig, as there is no other compiler."""
    environment = {"TIDE_WHEEL": machine, "TIDE_CXXFLAGS": flags}
    folder = sdist.parent / "compiled"
    pip("wheel", "--no-deps", "--wheel-dir", folder, sdist, cwd=sdist.parent, environment=environment)
    (path,) = folder.glob(f"*_{machine}.whl")
    return path


@pytest.fixture(scope="session")
def wheel(sdist: Path) -> Path:
    return compiled(sdist, platform.machine())


def test_the_sdist_holds_the_native_sources(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {
        str(path.relative_to(ROOT))
        for folder in NATIVE
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    needed |= {"CMakeLists.txt", "CMakePresets.json", "LICENSE", "constraints.txt"}
    assert needed - held == set()


def check_files(wheel: Path) -> None:
    """The wheel holds the package, its library and the header for C, and nothing else."""
    package = ROOT / "tide_export"
    needed = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    needed |= {"tide_export/py.typed", "tide_export/report/style.css"}
    needed |= {
        "tide_export/drafting/prompts.toml",
        "tide_export/drafting/prompts.txt",
        "tide_export/lower/cuda/kernels.txt",
    }
    needed |= {"tide_export/runtime/libtide.so", "tide_export/include/tide/tide.h"}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == needed


def check_library(wheel: Path, elf_machine: int) -> None:
    """The wheel's library is for this machine (an ELF number), and needs nothing newer or other than manylinux_2_28."""
    library = zipfile.ZipFile(wheel).read("tide_export/runtime/libtide.so")
    assert int.from_bytes(library[18:20], "little") == elf_machine
    needed = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    assert (2, 2) < max(needed) <= (2, 28)
    assert b"GLIBCXX" not in library


def test_a_wheel_is_whole_and_for_any_python_of_this_platform(assembled: Path) -> None:
    platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert assembled.name == f"tide_export-{tide_export.__version__}-py3-none-{platform_tag}.whl"
    check_files(assembled)
    archive = zipfile.ZipFile(assembled)
    assert archive.read("tide_export/runtime/libtide.so") == LIBRARY.read_bytes()
    assert archive.read("tide_export/include/tide/tide.h") == (ROOT / "cpp/include/tide/tide.h").read_bytes()


def test_a_wheel_runs_a_bundle(assembled: Path, demo_bundle: Path, tmp_path: Path) -> None:
    """Without the checkout, and without PyTorch."""
    zipfile.ZipFile(assembled).extractall(tmp_path)
    blocked = "import sys; sys.modules['torch'] = None\n"
    done = run(
        sys.executable,
        "-c",
        blocked + RUN,
        demo_bundle,
        tmp_path,
        cwd=tmp_path,
        environment={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == tokens_here(demo_bundle)


@pytest.mark.exhaustive
def test_the_wheel_for_this_machine_is_compiled_here(wheel: Path) -> None:
    machine = platform.machine()
    assert wheel.name == f"tide_export-{tide_export.__version__}-py3-none-manylinux_2_28_{machine}.whl"
    check_files(wheel)
    check_library(wheel, ELF_MACHINES[machine])


@pytest.mark.exhaustive
def test_a_wheel_for_the_other_machine_is_compiled_here(sdist: Path) -> None:
    """Nothing runs it here: tools/checks/arm64_wheel.sh does, in an emulator."""
    (machine,) = ELF_MACHINES.keys() - {platform.machine()}
    check_library(compiled(sdist, machine, flags="-O0"), ELF_MACHINES[machine])


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def lowest() -> dict[str, str]:
    """The lowest versions that the package and its `cpu` extra accept."""
    requirements = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["cpu"]]
    return {
        canonicalize_name(requirement.name): specifier.version
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


RUN = f"""
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
import tide_export
assert Path(tide_export.__file__).is_relative_to(sys.argv[2]), tide_export.__file__
assert version("tide_export") == tide_export.__version__
assert sys.modules.get("torch", find_spec("torch")) is None
print(tide_export.load(sys.argv[1], threads=1).generate({PROMPT}, max_new_tokens={NEW_TOKENS}).tokens)
"""


def tokens_here(bundle: Path) -> str:
    return str(tide_export.load(bundle, threads=1).generate(PROMPT, max_new_tokens=NEW_TOKENS).tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pins", [constraints, lowest])
def test_it_runs_a_bundle_in_an_empty_environment(pins, wheel: Path, demo_bundle: Path, tmp_path: Path) -> None:
    if pins is lowest and sys.version_info >= (3, 13):
        pytest.skip("NumPy's lowest accepted version has no wheel for this Python")
    venv.create(tmp_path / "venv", with_pip=False)
    programs = tmp_path / "venv" / "bin"
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in pins().items()))
    install = ("install", "--only-binary", ":all:", "--no-compile", "-c", pinned)
    pip("--python", programs / "python", *install, f"tide_export[cpu] @ {wheel.as_uri()}", cwd=tmp_path)

    done = run(programs / "python", "-c", RUN, demo_bundle, tmp_path / "venv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == tokens_here(demo_bundle)

    generated = run(
        programs / "tide-export", "generate", demo_bundle, "--prompt", "def ", "--max-new-tokens", 8, cwd=tmp_path
    )
    assert generated.returncode == 0, generated.stderr
    assert "8 tokens generated" in generated.stderr
    inspected = run(programs / "tide-export", "inspect", demo_bundle, cwd=tmp_path)
    assert inspected.returncode == 0, inspected.stderr
    assert "tide_export" in inspected.stdout


def test_constraints_name_a_version_of_every_package_that_pyproject_accepts() -> None:
    pins = constraints()
    extras = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        if requirement.name != PROJECT["name"]:
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
