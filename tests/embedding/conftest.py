"""The C++ runtime, built and installed once for all workers."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from builds import Embedding

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # the hand-made model

from tiny_model import TinyModel


@pytest.fixture(scope="module", autouse=True)
def _no_cuda() -> Iterator[None]:
    """No test here looks for a GPU: the CUDA runtime that a process opens stays open, and others bring their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CUDART", "none")
        yield


@pytest.fixture(scope="session")
def embedding(shared: Path) -> Embedding:
    kept = os.environ.get("TIDE_NATIVE_BUILDS")  # a folder that outlives the run, for whoever runs the tests often
    return Embedding((Path(kept) if kept else shared) / "embedding")


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
