"""Traces shared by all workers of a run: tracing takes most of the suite's time and is deterministic.

For tests of the stages after `trace`. A trace is computed when these arguments are first given for these weights. It
is always read from a file, so that no two tests share a graph.
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
        self,
        source: SourceModel,
        checkpoints: Sequence[int],
        max_length: int | None = None,
        every_layer: bool = False,
        lora_rank: int = 0,
    ) -> TracedModel:
        assert source.quantized is None, "quantized blocks are traced differently and are not in the key"
        length = max_length or source.context_length
        marked = range(source.num_layers) if every_layer else sorted({0, *checkpoints})  # a marker before each of these
        key = (source.weights_sha256, source.model.config.to_json_string(), tuple(marked), length, lora_rank)
        file = self.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.onnx"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                ir.save(trace(source, checkpoints, length, every_layer, lora_rank).model, file.with_suffix(".partial"))
                file.with_suffix(".partial").rename(file)
        return TracedModel(ir.load(file), (0, *checkpoints, source.num_layers), every_layer)
