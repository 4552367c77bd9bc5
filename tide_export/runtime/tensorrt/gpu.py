"""Detects the GPU through the CUDA driver, without any package.

`engines.build` does so before TensorRT is started, `providers` before an engine is selected.
"""

import ctypes
import functools
import re

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
MAJOR, MINOR = 75, 76  # CUdevice_attribute: compute capability
MULTIPROCESSORS, SHARED_MEMORY = 16, 97  # and what they have; shared memory of a block, where a kernel asks for more


@functools.cache
def compute_capability(device: int = 0) -> tuple[int, int] | None:
    """(major, minor) of the GPU, or None where there is none or no driver for it."""
    return _attributes(device, MAJOR, MINOR)


@functools.cache
def block_limits(device: int = 0) -> tuple[int, int] | None:
    """Bytes of shared memory that a block may have on the GPU, and its multiprocessors; None where there is none."""
    return _attributes(device, SHARED_MEMORY, MULTIPROCESSORS)


@functools.cache
def device_name(device: int = 0) -> str:
    """The GPU's name as part of a file's name, such as `NVIDIA-H100-PCIe`; "none" where there is none."""
    driver, handle = _opened(device)
    name = ctypes.create_string_buffer(256)
    if driver is None or driver.cuDeviceGetName(name, len(name), handle) != 0:
        return "none"
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.value.decode(errors="replace")).strip("-")


def _attributes(device: int, first: int, second: int) -> tuple[int, int] | None:
    """Two numbers of the GPU, by CUdevice_attribute; None where there is no GPU or driver that tells them."""
    driver, handle = _opened(device)
    numbers = ctypes.c_int(), ctypes.c_int()
    for attribute, number in zip((first, second), numbers, strict=True):
        if driver is None or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle) != 0:
            return None
    return numbers[0].value, numbers[1].value


def _opened(device: int) -> tuple[ctypes.CDLL | None, ctypes.c_int]:
    """The driver and its handle of a GPU; None where there is none."""
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
