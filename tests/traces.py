"""A store of traces for all tests, all workers and later runs: tracing takes most of the suite's time.

`Traces` is called like `trace`, which it replaces wherever a test exports a model (`conftest._stored_traces`); tests of
tracing itself call `trace`. A trace is made when a model is first traced with these arguments, and always read from a
file, so that no two tests share a graph. A folder holds the traces of one version of what makes them (`version`); only
the latest few are kept. Whatever is in the store may be deleted at any time.
"""

import fcntl
import hashlib
import pickle
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from tide_export.model.source import SourceModel
from tide_export.trace.tracer import TracedModel, trace

PACKAGE = Path(__file__).parents[1] / "tide_export"
FOLDERS = ("graph", "model", "names", "quantize", "trace")  # of the package, that a trace depends on
DISTRIBUTIONS = ("torch", "transformers", "onnxscript", "onnx-ir")
KEPT = 3  # versions


def version() -> str:
    """A hash of the sources and packages that make a trace."""
    made_by = hashlib.sha256(repr([metadata.version(name) for name in DISTRIBUTIONS]).encode())
    for path in sorted(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")):
        made_by.update(str(path.relative_to(PACKAGE)).encode())
        made_by.update(path.read_bytes())
    return made_by.hexdigest()[:16]


class Traces:
    """Traces of one version, in a folder under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / version()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.touch()
        self._in_use = (self.folder / "in-use").open("w")
        fcntl.flock(self._in_use, fcntl.LOCK_SH)
        _forget_old(folder)

    def __call__(
        self,
        source: SourceModel,
        checkpoints: Sequence[int],
        max_length: int | None = None,
        every_layer: bool = False,
        lora_rank: int = 0,
    ) -> TracedModel:
        if any(tensor.is_meta for tensor in _tensors(source.model)):
            return trace(source, checkpoints, max_length, every_layer, lora_rank)
        length = max_length or source.context_length
        marked = range(source.num_layers) if every_layer else sorted({0, *checkpoints})  # a marker before each of these
        file = self.folder / f"{_key(source, tuple(marked), length, lora_rank)}.onnx"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                traced = trace(source, checkpoints, length, every_layer, lora_rank)
                partial = file.with_suffix(".partial")
                try:
                    ir.save(traced.model, partial)
                    partial.rename(file)
                except OSError as error:
                    partial.unlink(missing_ok=True)
                    warnings.warn(f"a trace is not kept: {error}", stacklevel=1)
                    return traced
        return TracedModel(ir.load(file), (0, *checkpoints, source.num_layers), every_layer, source.architecture)


def _forget_old(folder: Path) -> None:
    """Deletes the traces of all but the latest versions, unless another run uses them."""
    versions = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for old in versions[:-KEPT]:
        with (old / "in-use").open("a") as in_use:
            try:
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(old, ignore_errors=True)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _key(source: SourceModel, *arguments: Any) -> str:
    """A hash of all that a trace depends on: the class and its code, the config, the weights as they are now."""
    model = source.model
    key = hashlib.sha256(repr((arguments, source.name if source.remote_code else "", repr(model))).encode())
    key.update(model.config.to_json_string().encode())
    key.update(repr([model.config._attn_implementation, source.structure.first_position]).encode())
    for module in sorted({type(module).__module__ for module in model.modules()}):
        if not module.startswith(("torch.", "transformers.")):
            key.update(Path(str(sys.modules[module].__file__)).read_bytes())
    for tensor in _tensors(model):
        key.update(repr((tensor.dtype, tensor.shape)).encode())
        key.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    key.update(pickle.dumps(source.quantized))
    return key.hexdigest()
