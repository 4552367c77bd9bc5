"""Builds of the native parts, shared by all tests and all workers, and kept for later runs (native_builds.py)."""

import shutil
from pathlib import Path

import pytest
from native_builds import Builds, need


@pytest.fixture(scope="session")
def builds() -> Builds:
    return Builds()


@pytest.fixture(scope="session")
def emulated(builds: Builds) -> Path:
    """The folder with the kernels and the plugins for the CPU, libtide_kernels_emulated.so and libtide_plugins_..."""
    need(shutil.which("cmake") is not None, "there is no cmake")
    return builds.plugins("emulated", "all") / "emulated"


@pytest.fixture(scope="session")
def kernel_build(builds: Builds) -> Path:
    """The folder with libtide_kernels.so and libtide_plugins.so."""
    need(shutil.which("cmake") is not None, "there is no cmake")
    need(shutil.which("nvcc") is not None, "there is no nvcc")
    return builds.kernels()
