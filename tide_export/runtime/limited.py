"""Runs functions on data that may be a stranger's in another process, with limits on time and memory.

A library in C or Rust cannot be interrupted, and a template can fill the memory: a process can be ended. It is started
when it is first needed, serves one call after the other, and is started anew after one that ended it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from tide_export.errors import first_line

MEMORY_BYTES = 1 << 30  # of the process
MAIN = "from tide_export.runtime.limited import main; main()"


class LimitError(Exception):
    """Reports that a call took longer or more memory than it may; its message goes after a noun."""


class LimitedProcess:
    """Calls functions of one module, whose arguments and results are JSON, in a process with limits."""

    def __init__(self, module: str, seconds: float, memory: int = MEMORY_BYTES) -> None:
        """Starts nothing yet.

        Args:
            seconds: that one call may take.
            memory: bytes of address space that the process may have beyond what it has at its start.
        """
        self._module, self._seconds, self._memory = module, seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def call(self, function: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Returns what the function of this name returns.

        Args:
            seconds: that it may take; None: as given before.

        Raises:
            LimitError: it took too long or too much memory.
            ValueError: it raised an exception; the message is the first line of its.
        """
        if self._owner != os.getpid():  # the process is that of a parent, which was forked
            self._lock, self._process, self._owner = threading.Lock(), None, os.getpid()
        asked = json.dumps([seconds or self._seconds, function, *arguments]).encode()
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(asked + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # of a signal handler: an answer that comes later is not of the next call
                self.close()
                raise
            if not answer.endswith(b"\n"):
                raise LimitError(self._end(seconds or self._seconds))
        result, error = json.loads(answer)
        if error is not None:
            raise ValueError(error)
        return result

    def interrupt(self) -> None:
        """Ends the process, from any thread, and so the call that another thread may be in: with LimitError."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-c", MAIN, self._module, str(self._memory)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        return self._process

    def _end(self, seconds: float) -> str:
        """Returns why the process ended in the middle of a call."""
        process = self._process
        assert process is not None
        code = process.wait()
        self.close()
        if code == -signal.SIGALRM:
            return f"takes longer than {seconds:g} s"
        return f"needs more than {self._memory >> 20} MiB of memory, or crashes"


def main() -> None:
    """Answers the calls that come as lines of JSON until there are no more; the limits end the process."""
    import resource

    module, memory = import_module(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    size = Path("/proc/self/statm")
    if size.exists():
        most, hard = int(size.read_text().split()[0]) * resource.getpagesize() + memory, resource.RLIM_INFINITY
        if (given := resource.getrlimit(resource.RLIMIT_AS)[1]) != hard:
            most = min(most, given)  # of `ulimit -v`, which only root may exceed
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        seconds, name, *arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process
        try:
            answer = [getattr(module, name)(*arguments), None]
        except MemoryError:
            os._exit(1)
        except Exception as error:
            answer = [None, first_line(error)]
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
