"""Detects the GPU through the CUDA driver, without any package.

`engines.build` does so before TensorRT is started, `providers` before an engine is selected.
"""

import ctypes
import functools

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
MAJOR, MINOR = 75, 76  # CUdevice_attribute: compute capability


@functools.cache
def compute_capability(device: int = 0) -> tuple[int, int] | None:
    """(major, minor) of the GPU, or None where there is none or no driver for it."""
    driver = _driver()
    if driver is None or driver.cuInit(0) != 0:
        return None
    handle = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return None
    numbers = []
    for attribute in (MAJOR, MINOR):
        number = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle) != 0:
            return None
        numbers.append(number.value)
    return numbers[0], numbers[1]


def _driver() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
