"""Loads bundles and generates from them in a process of its own, because a damaged graph may crash or hang it.

`Child` starts this file as a program, which reads the paths of bundles and answers each with one line.
"""

import contextlib
import json
import resource
import select
import subprocess
import sys
from pathlib import Path

from tide_export.errors import BundleError, TideError
from tide_export.runtime.engine import load
from tide_export.runtime.native import created, int64s, library, onnxruntime_library
from tide_export.runtime.token_stream import TokenStream

MEMORY = 3 << 30  # bytes of address space, of which ONNX Runtime's library alone takes some hundred millions
SECONDS, START_SECONDS = 20, 300  # for one bundle, for starting on a busy machine
OUTCOMES = ("result", "refused")
MODES = ("full", "exit", "lossless")


class Child:
    """The process; it is started again after a crash or a hang, and where it wrote something else to stdout."""

    def __init__(self) -> None:
        self._start()

    def run(self, bundle: Path) -> str:
        """ "result", "refused: CLASS SENTENCE" for a `TideError`, or what must not happen: "escaped: ...", "crash",
        "hang"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{bundle}\n")
        self._process.stdin.flush()
        answer = self._answer(SECONDS)
        if not answer.startswith(OUTCOMES):
            self.close()
            answer = answer or f"crash {self._process.returncode}"
            self._start()
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, seconds: float) -> str:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline().strip() if ready else "hang"

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._answer(START_SECONDS) == "ready"


def outcome(bundle: str) -> str:
    """What becomes of a bundle: short prompts in every mode.

    Where the package refuses it, by the library alone, which checks less of a manifest.
    """
    try:
        try:
            engine = load(bundle, threads=1)
        except BundleError:
            generate_by_the_library(bundle)
            return "result"
        for mode in MODES:
            engine.generate([1, 2, 3], max_new_tokens=4, mode=mode)
        if engine.max_batch_size > 1:
            engine.generate([[1, 2], [3]], max_new_tokens=3)
    except TideError as error:
        verdict = "escaped: several lines" if "\n" in str(error) else "refused"
        return f"{verdict}: {json.dumps(f'{type(error).__name__} {error}')}"
    except BaseException as error:
        return f"escaped: {json.dumps(f'{type(error).__name__} {error}'[:500])}"
    return "result"


def generate_by_the_library(bundle: str) -> None:
    given = {"provider": "cpu", "threads": 1, "onnxruntime": onnxruntime_library()}
    engine, prompt = created("load", bundle.encode(), json.dumps(given).encode()), int64s([1, 2, 3])
    for mode in MODES:
        options = json.dumps({"max_new_tokens": 4, "mode": mode}).encode()
        stream = created("token_stream_open", engine, prompt.ctypes.data, len(prompt), options, None, needed=(engine,))
        TokenStream(stream, None, None).finish()


def main() -> None:
    library()  # may take longer than a bundle
    print("ready", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(outcome(line.rstrip("\n")), flush=True)


if __name__ == "__main__":
    main()
