"""Cases of peers in processes of their own, and the check that their logits equal ours before they are timed.

`PeerProcess` starts `peer_process.py` in the Python environment that has the peer's packages, which may be of other
versions than ours. A peer answers one request at a time over a pipe, and times its step itself, so that neither the
pipe nor the child's start is in its figure. All wait alike, some 20 microseconds spinning: none spins into
another case's measurement.
"""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.spinning import SPIN_MICROSECONDS
from tide_export.cli.torch_environment import SPIN_ROUNDS

CHILD = Path(__file__).with_name("peer_process.py")
START_LIMIT, STEP_LIMIT = 3600.0, 300.0  # seconds: of a start that exports, and of a step
TOLERANCE = 2e-3  # of the largest logit


class PeerError(Exception):
    """A peer cannot be started, has failed, or its logits differ from ours."""


class PeerSpec(NamedTuple):
    name: str  # in peer_process.py
    title: str
    packages: str  # what to install for it


PEERS = (
    PeerSpec("eager", "Hugging Face eager", "transformers"),
    PeerSpec("tide", "TIDE 0.2.1", "tide-inference==0.2.1"),
    PeerSpec("optimum", "Optimum-ONNX", "optimum-onnx[onnxruntime]==0.1.0"),
    PeerSpec("exporters", "transformers.exporters, fused", "transformers==5.23.0 onnxscript onnxruntime"),
)


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
        return self._read(STEP_LIMIT)

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


class PeerProcess(ChildProcess):
    """A peer that has read `context` and waits for requests of steps."""

    def __init__(
        self, spec: PeerSpec, python: str, model: Path, context: Sequence[int], threads: int, folder: Path
    ) -> None:
        self.spec = spec
        job = {"peer": spec.name, "model": str(model), "context": list(context), "threads": threads}
        job |= {"spin": SPIN_MICROSECONDS, "folder": str(folder.resolve())}
        super().__init__([python, "-P", str(CHILD), json.dumps(job)], threads)
        self.version: str = self.ready["version"]

    def step(self) -> float:
        """Seconds of one decode step, by the peer's own clock."""
        return self.ask({"do": "step"})["seconds"]

    def logits(self) -> tuple[list[int], np.ndarray]:
        """All tokens up to the input of the last step, and its logits [V]."""
        reply = self.ask({"do": "logits"})
        return reply["ids"], np.array(reply["logits"])


def check_logits(theirs: np.ndarray, ours: np.ndarray) -> float:
    """The largest difference, in shares of the largest logit.

    Raises:
        PeerError: it is more than `TOLERANCE`, or another token is the likeliest.
    """
    if theirs.shape != ours.shape:
        raise PeerError(f"its logits are {theirs.shape}, ours {ours.shape}")
    apart = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    if not apart <= TOLERANCE or theirs.argmax() != ours.argmax():
        raise PeerError(
            f"its logits are not ours: {apart:.1e} of the largest apart, the likeliest token"
            f" {theirs.argmax()}, ours {ours.argmax()}"
        )
    return apart
