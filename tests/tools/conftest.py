"""The tools are scripts: importing one needs its folder on the path, as running it has."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="package", autouse=True)
def _tools_on_path() -> Iterator[None]:
    folders = [str(Path(__file__).parents[2] / "tools" / name) for name in ("benchmarks", "checks")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def session() -> ModuleType:
    """The program of a session on a lent GPU."""
    import gpu_session

    return gpu_session


@pytest.fixture(scope="module")
def plan(session: ModuleType) -> ModuleType:
    """Its steps."""
    return sys.modules["gpu_steps"]
