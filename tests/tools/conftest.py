"""The tools are scripts: importing one needs its folder on the path, as running it has."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="package", autouse=True)
def _tools_on_path() -> Iterator[None]:
    folders = [str(Path(__file__).parents[2] / "tools" / name) for name in ("benchmarks", "checks")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)
