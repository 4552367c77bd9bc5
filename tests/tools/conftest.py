"""The tools are scripts: importing one needs its folder on the path, as running it has."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="package", autouse=True)
def _tools_on_path() -> Iterator[None]:
    folder = str(Path(__file__).parents[2] / "tools" / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture
def demo_graphs(tmp_path: Path, demo_bundle: Path, demo_model: Path) -> Path:
    """A kept folder of graphs, all of which are the demo bundle: at full depth it is the graph without branches."""
    from harness.graphs import BRANCHED, PLAIN, Graphs, Recipe

    folder = tmp_path / "graphs"
    Graphs(Recipe(str(demo_model)), folder)
    for name in (PLAIN, BRANCHED):
        (folder / name).symlink_to(demo_bundle)
    return folder
