"""Whether a function lets other threads run."""

import threading
import time
from collections.abc import Callable


def turns_beside(function: Callable[[], object]) -> int:
    """How many times this thread wakes, at most every millisecond, while another one runs `function`."""
    thread, turns = threading.Thread(target=function), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    return turns
