"""Opens the native library, `libtide.so`, and calls its C interface (cpp/include/tide/tide.h).

The binding is ctypes, so one wheel serves every version of Python and a compiler is all that a build needs. ctypes
releases the interpreter's lock while a function runs, and runs signal handlers between two calls.
"""

import atexit
import ctypes
import logging
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tide_export.common.version import __version__
from tide_export.errors import (
    BundleError,
    ConfigError,
    ConstraintError,
    GenerationError,
    ProviderError,
    QueueFullError,
    TideError,
)

logger = logging.getLogger("tide_export")

LIBRARY = Path(__file__).with_name("libtide.so")
LEAVING_SECONDS = 10.0  # the interpreter waits at its end for steps of other threads, which then wait for ever
ADVICE = "install tide_export again on this machine"

OK, ENDED = 0, 1  # values of tide_status
GENERATION_ERROR, CONSTRAINT_ERROR = 4, 9
ERRORS: dict[int, type[TideError]] = {
    2: ConfigError,
    3: BundleError,
    GENERATION_ERROR: GenerationError,
    5: QueueFullError,
    6: ProviderError,
    CONSTRAINT_ERROR: ConstraintError,
}  # other statuses (no memory, an unexpected exception) become GenerationError


class Logprob(Structure):
    _fields_ = (("id", c_int64), ("logprob", c_double))


class Step(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_size_t),
        ("vocabulary", c_size_t),
        ("exit_layer", c_int64),
        ("segments_run", c_int64),
        ("scores", c_void_p),
    )


class SlotStep(Structure):
    _fields_ = (
        ("slot", c_size_t),
        ("ids", c_void_p),
        ("count", c_size_t),
        ("logits_to_keep", c_int64),
        ("full", c_int),
    )


class SchedulerState(Structure):
    _fields_ = (
        ("waiting", c_size_t),
        ("running", c_size_t),
        ("prefix_cache_bytes", c_int64),
        ("kv_tokens", c_int64),
        ("closed", c_int),
        ("in_step", c_int),
    )


class AuditState(Structure):
    _fields_ = (
        ("audited", c_int64),
        ("checked", c_int64),
        ("different", c_int64),
        ("raises", c_int64),
        ("upper_bound", c_double),
        ("lower_bound", c_double),
    )


Log = ctypes.CFUNCTYPE(None, c_char_p)
ProcessLogits = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t)
AllowsToken = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_int64)
Detokenize = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t, POINTER(c_size_t))


class HooksStruct(Structure):
    _fields_ = (
        ("context", c_void_p),
        ("process_logits", ProcessLogits),
        ("allows_token", AllowsToken),
        ("detokenize", Detokenize),
        ("reports", c_int),
    )


_HANDLE, _OUT, _IDS = c_void_p, POINTER(c_void_p), c_void_p
_REQUEST = (_IDS, c_size_t, c_char_p, POINTER(HooksStruct))  # prompt, count, options, hooks
# The result's type (None: a status) and the arguments' types, by name without "tide_".
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "version": (c_char_p, ()),
    "last_error": (c_char_p, ()),
    "set_log": (c_void_p, (c_void_p,)),
    "memory_limit": (c_int64, ()),
    "memory_left": (c_int64, ()),
    "leave": (c_int, (c_double,)),
    "load": (None, (c_char_p, c_char_p, _OUT)),
    "load_networks": (None, (c_char_p, c_char_p, c_void_p, _OUT)),
    "set_error": (c_void_p, (c_char_p,)),
    "report": (c_void_p, (c_int,)),
    "engine_free": (c_void_p, (_HANDLE,)),
    "max_batch_size": (c_int64, (_HANDLE,)),
    "provider": (c_char_p, (_HANDLE,)),
    "resolve": (None, (_HANDLE, c_char_p, c_size_t, c_void_p, c_size_t, POINTER(c_size_t))),
    "token_stream_open": (None, (_HANDLE, *_REQUEST, _OUT)),
    "token_stream_step": (None, (_HANDLE, c_size_t, c_void_p, c_size_t, POINTER(c_size_t))),
    "token_stream_so_far": (None, (_HANDLE, _OUT)),
    "token_stream_free": (c_void_p, (_HANDLE,)),
    "generation_tokens": (c_void_p, (_HANDLE, POINTER(c_size_t))),
    "generation_finish_reason": (c_char_p, (_HANDLE,)),
    "generation_stats": (c_char_p, (_HANDLE,)),
    "generation_states": (c_void_p, (_HANDLE, POINTER(c_size_t))),
    "generation_text": (c_void_p, (_HANDLE, POINTER(c_size_t))),
    "generation_logprobs": (POINTER(Logprob), (_HANDLE, c_size_t, POINTER(c_size_t))),
    "generation_prompt_logprobs": (POINTER(Logprob), (_HANDLE, c_size_t, POINTER(c_size_t))),
    "generation_free": (c_void_p, (_HANDLE,)),
    "scheduler_create": (None, (_HANDLE, c_char_p, _OUT)),
    "scheduler_start": (None, (_HANDLE,)),
    "scheduler_step": (c_int, (_HANDLE,)),
    "scheduler_close": (c_void_p, (_HANDLE, c_int)),
    "scheduler_free": (c_void_p, (_HANDLE,)),
    "scheduler_describe": (SchedulerState, (_HANDLE,)),
    "scheduler_audit": (None, (_HANDLE, POINTER(AuditState))),
    "scheduler_watch": (None, (_HANDLE, c_int)),
    "scheduler_unwatch": (c_void_p, (_HANDLE, c_int)),
    "submit": (None, (_HANDLE, *_REQUEST, POINTER(c_double), _OUT)),
    "request_wait": (c_void_p, (_HANDLE, c_size_t, c_double)),
    "request_read": (c_size_t, (_HANDLE, c_size_t, c_void_p, c_size_t, POINTER(c_int))),
    "request_logprobs": (c_size_t, (_HANDLE, c_size_t, POINTER(Logprob), c_size_t)),
    "request_text": (c_size_t, (_HANDLE, c_size_t, c_void_p, c_size_t)),
    "request_so_far": (None, (_HANDLE, _OUT)),
    "request_mode": (c_char_p, (_HANDLE,)),
    "request_cached_tokens": (c_int64, (_HANDLE,)),
    "request_cancel": (c_void_p, (_HANDLE,)),
    "request_free": (c_void_p, (_HANDLE,)),
    "sequence_create": (None, (_HANDLE, POINTER(c_double), c_size_t, c_int64, c_char_p, _OUT)),
    "sequence_step": (None, (_HANDLE, _IDS, c_size_t, c_int64, c_int, POINTER(Step))),
    "sequence_rewind": (None, (_HANDLE, c_int64)),
    "sequence_set_thresholds": (None, (_HANDLE, POINTER(c_double), c_size_t)),
    "sequence_lengths": (None, (_HANDLE, POINTER(c_int64))),
    "sequence_free": (c_void_p, (_HANDLE,)),
    "sample": (None, (c_char_p, c_int64, c_void_p, c_size_t, POINTER(c_int64))),
    "batch_create": (None, (_HANDLE, c_double, c_int64, _OUT)),
    "batch_free_slots": (c_size_t, (_HANDLE,)),
    "batch_join": (None, (_HANDLE, POINTER(c_double), c_size_t, c_int64, c_char_p, POINTER(c_size_t))),
    "batch_leave": (None, (_HANDLE, c_size_t)),
    "batch_step": (None, (_HANDLE, POINTER(SlotStep), c_size_t, POINTER(Step))),
    "batch_rewind": (None, (_HANDLE, c_size_t, c_int64)),
    "batch_lengths": (None, (_HANDLE, c_size_t, POINTER(c_int64))),
    "batch_free": (c_void_p, (_HANDLE,)),
    "replay": (None, (c_char_p, _IDS, c_size_t, c_void_p, _IDS, _IDS, c_size_t, c_size_t, *[c_void_p] * 3)),
}

# The function that frees the object that a function creates.
_FREES = {
    "load": "engine_free",
    "load_networks": "engine_free",
    "token_stream_open": "token_stream_free",
    "token_stream_so_far": "generation_free",
    "scheduler_create": "scheduler_free",
    "submit": "request_free",
    "request_so_far": "generation_free",
    "sequence_create": "sequence_free",
    "batch_create": "batch_free",
}

_alone: list[bool] = []  # whether no other thread could use an object when the interpreter ended
_interrupts: list[BaseException] = []  # at most one, raised in a callback: KeyboardInterrupt or another non-Exception


@Log
def _log(sentence: bytes) -> None:
    logger.warning("%s", sentence.decode(errors="replace"))


@cache
def library() -> ctypes.CDLL:
    """Opens the library and declares its functions.

    Raises:
        ProviderError: it is missing or damaged, or was built for another machine or version.
    """
    defect, opened = _defect(LIBRARY), None
    if defect is None:
        try:
            opened = ctypes.CDLL(str(LIBRARY))
        except OSError as error:
            defect = str(error)
    if opened is None:
        raise ProviderError(f"the runtime's library '{LIBRARY}' cannot be opened ({defect}): {ADVICE}")
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(opened, f"tide_{name}")
            function.restype, function.argtypes = (c_int if result is None else result), arguments
    except AttributeError as error:
        raise ProviderError(f"'{LIBRARY}' was compiled from older sources ({error}): {ADVICE}") from None
    if (built := opened.tide_version().decode()) != __version__:
        raise ProviderError(f"'{LIBRARY}' is of tide_export {built}, not {__version__}: {ADVICE}")
    opened.tide_set_log(ctypes.cast(_log, c_void_p))
    sys.unraisablehook = partial(_keep_ignored, sys.unraisablehook)
    atexit.register(opened.tide_set_log, None)
    weakref.finalize(opened, int).detach()  # what it runs at exit, as the first one, is registered now: before `_leave`
    atexit.register(_leave, opened)
    return opened


def _defect(path: Path) -> str | None:
    """Returns a defect of the file that the loader would not report or would crash on; None: none."""
    if not path.is_file():
        return "it is missing"
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\2" or len(header) < 64:  # not a 64-bit ELF file
        return None
    executable = Path("/proc/self/exe")  # Python, which runs on this CPU
    if executable.exists():
        with executable.open("rb") as file:
            python = file.read(20)
        if (header[4:6], header[18:20]) != (python[4:6], python[18:20]):
            return "it is for another kind of CPU"
    (sections,), (entry, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=HH", header, 58)
    size = path.stat().st_size
    return f"it is truncated: {size} of {sections + entry * count} bytes" if size < sections + entry * count else None


def onnxruntime_library() -> str | None:
    """Returns the path of the installed package's library; None: none, or TIDE_ONNXRUNTIME is set."""
    if os.environ.get("TIDE_ONNXRUNTIME"):
        return None
    try:
        spec = find_spec("onnxruntime")
    except ModuleNotFoundError:  # its import is blocked (sys.modules or a meta path finder)
        spec = None
    if spec is None or spec.origin is None:
        return None
    files = sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime*"))
    libraries = [path for path in files if "providers" not in path.name]
    return str(libraries[0]) if libraries else None


def keep_interrupt(error: BaseException) -> bool:
    """Keeps a signal handler's exception for the caller, because no exception may cross C.

    Returns:
        False in other threads than the main one: signal handlers do not run there, so nothing is kept.
    """
    if not _in_main_thread():
        return False
    _interrupts[:] = [error]
    return True


def _keep_ignored(otherwise: Callable[[Any], object], ignored: Any) -> None:
    """Keeps a signal handler's exception that Python would ignore (a `sys.unraisablehook`).

    Raised before the first line of a callback, it makes the library's call fail, because the callback has reported
    nothing, and that call raises it. Raised while an object is freed, it is raised by the next call.
    """
    called = __package__ in f"{ignored.err_msg} {ignored.object!r}" and "ctypes" in str(ignored.err_msg)
    ours = called or isinstance(ignored.object, weakref.finalize)
    error = ignored.exc_value
    if not ours or error is None or isinstance(error, Exception) or not keep_interrupt(error):
        otherwise(ignored)


def raise_interrupt() -> None:
    """Raises the exception that `keep_interrupt` kept, if any."""
    if _interrupts and _in_main_thread():
        raise _interrupts.pop()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def error_of(status: int) -> TideError:
    """Returns the error of a status, with the message of the last call that failed in this thread.

    A signal handler's exception that was kept is raised instead.
    """
    raise_interrupt()
    sentence = library().tide_last_error().decode(errors="replace")
    return ERRORS.get(status, GenerationError)(sentence)


def check(status: int) -> None:
    """Raises the error of a status, unless it is a success."""
    if status > ENDED:
        raise error_of(status)


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status.

    Raises:
        TideError: the function failed; the class names the stage.
        KeyboardInterrupt: Ctrl-C was pressed while an object was freed; the function is not called.
    """
    raise_interrupt()
    check(getattr(library(), f"tide_{name}")(*arguments))


class Owned:
    """Holds the handle of a library object, and frees the object with its last reference.

    It is freed also when a signal handler's exception ends the call that creates it.

    Attributes:
        pointer: the address of the handle, for the function that creates the object.
    """

    def __init__(self, creates: str, needed: tuple[Any, ...] = ()) -> None:
        """Prepares a handle for the function named `creates`.

        Args:
            needed: objects that must outlive this one; none may refer to it.
        """
        self._as_parameter_ = c_void_p()
        self.pointer = ctypes.byref(self._as_parameter_)
        free = getattr(library(), f"tide_{_FREES[creates]}")
        weakref.finalize(self, _free, free, self._as_parameter_, needed)

    def __bool__(self) -> bool:
        """Returns whether the object was created."""
        return bool(self._as_parameter_)


def _free(free: Any, handle: c_void_p, needed: tuple[Any, ...]) -> None:
    if all(_alone):
        free(handle)  # before `needed` is released


def _leave(opened: ctypes.CDLL) -> None:
    """Makes threads that run something wait for ever; what they may read is freed no more."""
    left = bool(opened.tide_leave(LEAVING_SECONDS))
    _alone.append(left and threading.active_count() == 1)


def created(name: str, *arguments: Any, needed: tuple[Any, ...] = ()) -> Owned:
    """Calls a function whose last argument receives a new object, and returns the object's handle.

    Raises what `call` raises; `needed` is that of `Owned`.
    """
    handle = Owned(name, needed)
    call(name, *arguments, handle.pointer)
    return handle


def int64s(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the numbers as a contiguous int64 [n]; `.ctypes.data` is their address."""
    return np.ascontiguousarray(values, np.int64)


def doubles(values: Sequence[float]) -> Any:
    """Returns the numbers as a C array."""
    return (c_double * len(values))(*values)


def floats_at(address: int | None, *shape: int) -> np.ndarray:
    """Returns a copy of float32 numbers in the library's memory; an empty array without an address."""
    count = int(np.prod(shape)) if address else 0
    if not count or address is None:
        return np.zeros(shape if not count and address else (0,), np.float32)
    return np.ctypeslib.as_array((c_float * count).from_address(address)).reshape(shape).copy()


def text_at(address: int, size: int) -> str:
    return ctypes.string_at(address, size).decode(errors="replace")
