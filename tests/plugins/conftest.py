"""Builds of the native parts, shared by all tests and all workers."""

import os
import shutil
from pathlib import Path

import pytest
from native_builds import KERNELS_EMULATED, Builds, need


@pytest.fixture(scope="session")
def builds(shared: Path) -> Builds:
    shared_builds = os.environ.get("TIDE_NATIVE_BUILDS")  # a folder that outlives the run, to reuse builds
    folder = Path(shared_builds) if shared_builds else shared / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return Builds(folder)


@pytest.fixture(scope="session")
def emulated(builds: Builds) -> Path:
    """The folder with the kernels for the CPU, without clusters and with them: libtide_kernels_sm75.so and _sm90.so."""
    need(shutil.which("cmake") is not None, "there is no cmake")
    return builds.emulated(KERNELS_EMULATED)


@pytest.fixture(scope="session")
def emulated_plugins(builds: Builds, emulated: Path) -> Path:
    """libtide_plugins_emulated.so."""
    return builds.emulated("tide_plugins_emulated") / "libtide_plugins_emulated.so"


@pytest.fixture(scope="session")
def kernel_build(builds: Builds) -> Path:
    """The folder with libtide_kernels.so and libtide_plugins.so."""
    need(shutil.which("cmake") is not None, "there is no cmake")
    need(shutil.which("nvcc") is not None, "there is no nvcc")
    return builds.kernels() / "plugins"
