"""The C++ runtime, built once for all workers, and engines of both runtimes on the same bundles."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from c_interface import open_library
from cpp_builds import SANITIZE, CppBuild, need
from cpp_engine import CppEngine

from tide_export.runtime.engine import Engine, load

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # the hand-made model, and the judge in plain numpy

from tiny_model import TinyModel


@pytest.fixture(scope="session")
def cpp(shared: Path) -> CppBuild:
    shared_builds = os.environ.get(
        "TIDE_NATIVE_BUILDS"
    )  # a folder that outlives the run, for whoever runs the tests often
    folder = (Path(shared_builds) if shared_builds else shared) / f"cpp-{SANITIZE}".replace(",", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return CppBuild(folder)


@pytest.fixture(scope="session")
def open_cpp(cpp: CppBuild) -> Iterator[Callable[..., CppEngine]]:
    """Opens a bundle in the C++ runtime."""
    opened: list[CppEngine] = []

    def opens(bundle: Path, threads: int | None = 1, verify: bool = True, **options: Any) -> CppEngine:
        opened.append(CppEngine(cpp.driver, bundle, threads, verify, **options))
        return opened[-1]

    yield opens
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def c_library(cpp: CppBuild) -> ctypes.CDLL:
    """libtide in this process."""
    need_preloaded_sanitizer()
    return open_library(cpp.prefix / "lib" / "libtide.so")


@pytest.fixture(scope="session")
def c_networks_library(cpp: CppBuild) -> ctypes.CDLL:
    """The library of c_networks.cpp in this process."""
    need_preloaded_sanitizer()
    return open_library(cpp.driver.parent / "libtide_networks.so")


def need_preloaded_sanitizer() -> None:
    if SANITIZE and "san" not in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("Python is not built with the sanitizer that the library needs: LD_PRELOAD it")


@pytest.fixture(scope="session")
def tokenizers_library() -> Path:
    """A library with the C binding of tokenizers."""
    spec = find_spec("litert_lm")
    need(spec is not None and bool(spec.submodule_search_locations), "litert-lm-api is not installed")
    return Path(spec.submodule_search_locations[0]) / "liblitert-lm.so"


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="session")
def tiny_bundle(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="session")
def tiny_engines(tiny_bundle: Path, open_cpp: Callable[..., CppEngine]) -> dict[str, Engine | CppEngine]:
    return {"python": load(tiny_bundle, threads=1), "cpp": open_cpp(tiny_bundle)}


@pytest.fixture(params=["python", "cpp"])
def tiny_engine(request: pytest.FixtureRequest, tiny_engines: dict[str, Engine | CppEngine]) -> Engine | CppEngine:
    """Each of the two: what a test says holds for both."""
    return tiny_engines[request.param]
