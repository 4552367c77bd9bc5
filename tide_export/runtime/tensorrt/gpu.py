"""Reads the GPU's properties from the CUDA driver, without any package."""

import ctypes
import functools
import re

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
MAJOR, MINOR = 75, 76  # CUdevice_attribute: compute capability


@functools.cache
def compute_capability(device: int = 0) -> tuple[int, int] | None:
    """Returns the GPU's (major, minor), or None without a GPU or its driver."""
    driver, handle = _opened(device)
    numbers = ctypes.c_int(), ctypes.c_int()
    for attribute, number in zip((MAJOR, MINOR), numbers, strict=True):
        if driver is None or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle) != 0:
            return None
    return numbers[0].value, numbers[1].value


@functools.cache
def device_name(device: int = 0) -> str:
    """Returns the GPU's name for use in a file name, such as `NVIDIA-H100-PCIe`; "none" without one."""
    driver, handle = _opened(device)
    name = ctypes.create_string_buffer(256)
    if driver is None or driver.cuDeviceGetName(name, len(name), handle) != 0:
        return "none"
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.value.decode(errors="replace")).strip("-")


def _opened(device: int) -> tuple[ctypes.CDLL | None, ctypes.c_int]:
    """Returns the driver, None without a GPU, and the driver's handle of the GPU."""
    driver, handle = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return None, handle
    return driver, handle


def _driver() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
