"""Ends a call at any point by an exception, as a signal handler may."""

import dis
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tide_export

PACKAGE = str(Path(tide_export.__file__).parent)
# Instructions that may change something; loads, jumps and comparisons do not.
CHANGING = ("CALL", "STORE_", "DELETE_", "FOR_ITER", "LIST_", "BINARY_OP", "SEND", "BEFORE_WITH", "UNPACK_")
CHANGES = {code for name, code in dis.opmap.items() if name.startswith(CHANGING) and name != "STORE_FAST"}
LOAD_FAST = dis.opmap["LOAD_FAST"]
FINALIZE = weakref.finalize.__call__.__code__
RETURNS = {code for name, code in dis.opmap.items() if name.startswith("RETURN_")}


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


def interrupted(call: Callable[[], Any], point: int) -> bool:
    """Ends `call` at a point, by number, where something in this package has just changed; whether it has so many.

    CPython runs signal handlers after calls and where loops and functions begin: none comes right before a return.
    Finalizers, of whatever dies meanwhile, have no points: CPython drops what they raise, and the call goes on.
    """
    count, caller = 0, sys._getframe()

    def finalizing(frame: FrameType | None) -> bool:
        while frame is not None and frame is not caller:
            if frame.f_code is FINALIZE:
                return True
            frame = frame.f_back
        return False

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or finalizing(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, changed = frame.f_code.co_code, False

        def instruction(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count, changed
            if event == "opcode":
                current = code[frame.f_lasti]
                returns = current in RETURNS or (current == LOAD_FAST and code[frame.f_lasti + 2] in RETURNS)
                if changed and not returns:
                    count += 1
                    if count > point:
                        raise Interrupted
                changed = current in CHANGES
            return instruction

        return instruction

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False
