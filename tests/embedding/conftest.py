"""The C++ runtime, built and installed once for all workers; and the package's library, opened as by a program in C."""

import ctypes
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from builds import Embedding
from c_interface import CEngine, open_library

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # the hand-made model

from tiny_model import TinyModel

from tide_export.runtime.engine import Engine
from tide_export.runtime.native import LIBRARY


@pytest.fixture(scope="module", autouse=True)
def _no_cuda() -> Iterator[None]:
    """No test here looks for a GPU: the CUDA runtime that a process opens stays open, and others bring their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CUDART", "none")
        yield


@pytest.fixture(scope="session")
def embedding() -> Embedding:
    return Embedding()


@pytest.fixture(scope="session")
def tokenizers_library() -> Path:
    """A library with the C binding of tokenizers."""
    spec = find_spec("litert_lm")
    assert spec is not None
    assert spec.submodule_search_locations, "litert-lm-api is not installed"
    return Path(spec.submodule_search_locations[0]) / "liblitert-lm.so"


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module")
def c_library() -> ctypes.CDLL:
    """The package's library, opened as another program opens it."""
    return open_library(LIBRARY)


@pytest.fixture(scope="module")
def loaded(c_library: ctypes.CDLL, tiny_llama) -> Iterator[CEngine]:
    engine = CEngine(c_library, tiny_llama.exact)
    yield engine
    engine.close()
