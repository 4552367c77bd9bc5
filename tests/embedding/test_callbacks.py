"""Callbacks of a program in C++ that throw (callbacks.cpp): what they threw reaches the caller, and nothing else is
lost."""

import subprocess
from pathlib import Path

from builds import Embedding, environment, run
from bundles import with_engines
from tiny_engines import TinyLlama


def test_what_callbacks_throw(embedding: Embedding, tiny_llama: TinyLlama, demo_bundle: Path, tmp_path: Path) -> None:
    built = with_engines(demo_bundle, tmp_path / "built")
    lines = run([str(embedding.callbacks), str(tiny_llama.exact), str(built)]).splitlines()
    assert lines == ["153 thrown"], "9 tokens of one prompt and of three, hooks and a log, in four modes"


def test_auto_says_once_why_it_takes_the_cpu(embedding: Embedding, demo_bundle: Path, tmp_path: Path) -> None:
    built = with_engines(demo_bundle, tmp_path / "built")
    command = [embedding.program, built, "--ids", "1,2", "--no-verify", "--max-new-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tide_runtime: running '{built}' with ONNX Runtime on the CPU, not with tensorrt: ")
