"""Traces kept for all workers of a run: tracing takes most of the suite's time, and gives the same every time.

For tests of what stands behind `trace`. Each trace is made by the real function the first time it is asked for, with
exactly these arguments on exactly these weights. What is handed out is always read from a file: a graph of one's own.
"""

import fcntl
import hashlib
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from tide_export.model.source import SourceModel
from tide_export.trace.tracer import TracedModel, trace


class Traces:
    """Called like `trace`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder

    def __call__(
        self, source: SourceModel, checkpoints: Sequence[int], max_length: int | None = None, every_layer: bool = False
    ) -> TracedModel:
        assert source.quantized is None, "quantized blocks are traced differently, and the key says nothing of them"
        length = max_length or source.context_length
        asked = (source.weights_sha256, source.model.config.to_json_string(), tuple(checkpoints), length, every_layer)
        file = self.folder / f"{hashlib.sha256(repr(asked).encode()).hexdigest()}.onnx"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                made = trace(source, checkpoints, length, every_layer).model
                ir.save(made, file.with_suffix(".partial"))
                file.with_suffix(".partial").rename(file)
        return TracedModel(ir.load(file), (0, *checkpoints, source.num_layers), every_layer)
