"""A bundle with engines of the module's flavour, and the library that opens it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "runtime" / "gpu"))  # the stand-in for the CUDA runtime
sys.path.append(str(Path(__file__).parents[3] / "packaging"))

from c_interface import CEngine
from caller_networks import CallersNetworks
from fake_cudart import SOURCE, FakeCudart, compiled
from judge import TEXT
from native_builds import Builds
from plan_files import with_engines
from store import locked
from tiny_engines import TinyLlama
from trt_build import Build, Opens, headers_of

from tide_export.bundle.opened import open_bundle
from tide_export.runtime.engine import Engine
from tide_export.verify.export_gate import dividing_thresholds


@pytest.fixture(scope="module")
def flavour(request: pytest.FixtureRequest) -> str:
    """Of the module, whose headers are here."""
    headers_of(request.module.FLAVOUR)
    return request.module.FLAVOUR


@pytest.fixture(scope="module")
def cudart_library(flavour: str, shared: Path) -> Path:
    return compiled(SOURCE, shared / "fake_cudart.so")


@pytest.fixture(scope="module")
def build(flavour: str, cudart_library: Path, tiny_llama: TinyLlama) -> Build:
    folder = Builds().folder
    with locked(folder / flavour):
        build = Build(flavour, folder, cudart_library)
    build.run_networks(CallersNetworks(open_bundle(tiny_llama.exact)))
    return build


@pytest.fixture(autouse=True)
def cudart(cudart_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    monkeypatch.setenv("TIDE_CUDART", str(cudart_library))
    cudart = FakeCudart(cudart_library)
    cudart.reset()
    yield cudart
    cudart.reset(devices=0)


@pytest.fixture(scope="module")
def graph(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module")
def thresholds(tiny_llama: TinyLlama) -> list[float]:
    return dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)


@pytest.fixture
def bundle(build: Build, tiny_llama: TinyLlama, flavour: str, tmp_path: Path) -> Path:
    return with_engines(tiny_llama.exact, tmp_path / "bundle", flavour, build.version)


@pytest.fixture
def opens(build: Build, flavour: str) -> Iterator[Opens]:
    """Opens a bundle; the engines are closed at the end."""
    opened: list[CEngine] = []

    def opens(bundle: Path, provider: str = flavour, **options: Any) -> CEngine:
        build.log.clear()
        given = {"threads": None, "verify": False, "provider": provider} | options
        opened.append(CEngine(build.functions, bundle, **given))
        return opened[-1]

    yield opens
    for engine in opened:
        engine.close()
