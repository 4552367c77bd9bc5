"""A GPU and the kernel, from TIDE_KERNELS_LIBRARY or built here with nvcc, for the tests on a GPU."""

import ctypes
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
from kernel_runner import DeviceMemory, Runner, load_cudart
from native_builds import Builds


def no_gpu() -> str | None:
    """Why there is no GPU to test on, or None."""
    try:
        count = ctypes.c_int()
        status = load_cudart().cudaGetDeviceCount(ctypes.byref(count))
    except OSError as error:
        return str(error)
    return None if status == 0 and count.value > 0 else f"no GPU here (cudaGetDeviceCount gave error {status})"


@pytest.fixture(scope="session")
def kernels_library() -> Path:
    reason = no_gpu()
    if reason is not None:
        pytest.skip(reason)
    given = os.environ.get("TIDE_KERNELS_LIBRARY")
    if given:
        return Path(given)
    if shutil.which("nvcc") is None or shutil.which("cmake") is None:
        pytest.skip("there is no nvcc or no cmake; TIDE_KERNELS_LIBRARY may name a library that was built elsewhere")
    return Builds().kernels() / "libtide_kernels.so"


@pytest.fixture(scope="session")
def runner(kernels_library: Path) -> Runner:
    return Runner(kernels_library, DeviceMemory)
