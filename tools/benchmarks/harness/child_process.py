"""Runs a program in a process of its own that answers requests, for cases in other Python environments."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence

from tide_export.cli.torch_environment import SPIN_ROUNDS

START_LIMIT, ANSWER_LIMIT = 3600.0, 300.0  # seconds


class PeerError(Exception):
    """A peer cannot be started, or has failed."""


class ChildProcess:
    """A program that answers requests, one JSON object a line, and announces itself with a first line."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        """Starts it, and waits until it is ready.

        Attributes:
            ready: its first line.

        Raises:
            PeerError: it cannot be started; the message ends with its last output.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(SPIN_ROUNDS)}
        environment.pop("PYTHONPATH", None)  # ours may hold modules of the peer's environment
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed by `close`
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
        try:
            self.ready = self._read(START_LIMIT)
        except PeerError:
            self.close()
            raise

    def ask(self, request: dict) -> dict:
        """The answer to `request`.

        Raises:
            PeerError: it failed, has ended, or does not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"it has ended{self._last_output()}") from None
        return self._read(ANSWER_LIMIT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self, limit: float) -> dict:
        assert self._process.stdout is not None
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        if not line:
            raise PeerError(f"no answer within {limit:g} s" if late else f"it has ended{self._last_output()}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _last_output(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f": {lines[-1]}" if lines else f" with status {self._process.returncode}"
