"""How long a thread of ONNX Runtime spins for work before it sleeps: what the runtime sets, and a way to try others.

The runtime has no option for it. `spin` therefore replaces a function in the table of ONNX Runtime's C interface, which
lies in this process and is the runtime's only way to ONNX Runtime.
"""

import ctypes
import mmap
from collections.abc import Callable

from tide_export.runtime.native import onnxruntime_library

SPIN_MICROSECONDS = 20  # kSpinMicroseconds of cpp/src/onnxruntime/session.cpp
KEY = b"session.intra_op.spin_duration_us"
API_VERSION = 18  # kVersion of cpp/ops/onnxruntime_abi.h
ADD_SESSION_CONFIG_ENTRY = 130  # of cpp/src/onnxruntime/functions.h

AddConfigEntry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_replacements = list[Callable[..., object]]()  # kept, because the table points to them


class _ApiBase(ctypes.Structure):
    _fields_ = (("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),)


def spin(microseconds: int) -> None:
    """Lets the threads of engines that this process opens from now on spin so long; -1: ONNX Runtime's default."""
    replace_entry(lambda key, value: str(microseconds).encode() if key == KEY else value)


def replace_entry(change: Callable[[bytes, bytes], bytes]) -> None:
    """Gives ONNX Runtime for an entry of a session's configuration what `change` makes of its key and value."""
    library = ctypes.CDLL(onnxruntime_library())
    library.OrtGetApiBase.restype = ctypes.POINTER(_ApiBase)
    table = library.OrtGetApiBase().contents.get_api(API_VERSION)
    address = table + ADD_SESSION_CONFIG_ENTRY * ctypes.sizeof(ctypes.c_void_p)
    entry = ctypes.c_void_p.from_address(address)
    original = AddConfigEntry(entry.value or 0)
    replacement = AddConfigEntry(lambda options, key, value: original(options, key, change(key, value)))
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError("the table of ONNX Runtime's functions cannot be written to")
    entry.value = ctypes.cast(replacement, ctypes.c_void_p).value
    _replacements.append(replacement)
