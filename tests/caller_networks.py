"""The segment networks of a bundle run by onnxruntime's Python package, through the interface for networks that the
caller runs: what a test lets fail, changes or counts."""

import ctypes
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from tide_export.bundle.file_names import network_file
from tide_export.bundle.network_spec import NetworkSpec, RunSize, Tensor, specs
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError
from tide_export.runtime.callers_networks import load_networks
from tide_export.runtime.engine import Engine

Run = tuple[str, int, int]  # the network, tokens of each sequence, and sequences


class Gpu(Protocol):
    """A stand-in for one (runtime/gpu/fake_cudart.py)."""

    def queue(self, stream: int, work: Callable[[], object]) -> None: ...
    def check(self, address: int, size: int) -> None: ...


class CallersNetworks:
    """The networks, and what happens to their runs.

    Attributes:
        runs: so far.
        before: called with each run before it; what it raises fails the run.
        after: called with each run after it, and with its tensors by name.
        recorded: how often runs were captured.
        opened: sets of buffers that are open.
        forgotten: numbers of recordings that are gone.
    """

    def __init__(self, bundle: Bundle, gpu: Gpu | None = None) -> None:
        """`gpu`: on whose streams the runs are queued."""
        self.gpu = gpu
        self.specs: Mapping[str, NetworkSpec] = specs(bundle.manifest, bundle.manifest.networks)
        files = {name: bundle.path / network_file(name) for name in self.specs}
        self._sessions = {name: _session(str(file), file.stat().st_mtime_ns) for name, file in files.items()}
        self.runs: list[Run] = []
        self.before: Callable[[Run], None] = lambda run: None
        self.after: Callable[[Run, Mapping[str, np.ndarray]], None] = lambda run, tensors: None
        self.recorded, self.opened, self.forgotten = Counter[Run](), 0, list[int]()

    def __call__(self, stream: int | None) -> "CallersNetworks | Queued":
        self.opened += 1
        return self if stream is None else Queued(self, stream)

    def run(self, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool) -> bool:
        one = name, size.tokens, size.batch_size
        self.before(one)
        self.runs.append(one)
        self.recorded[one] += captured
        spec = self.specs[name]
        tensors = {
            key: _array(addresses[key], tensor, size)
            for key, tensor in itertools.chain(spec.inputs.items(), spec.outputs.items())
        }
        given = {key: tensors[key] for key in spec.inputs}
        for key, value in zip(spec.outputs, self._sessions[name].run(list(spec.outputs), given), strict=True):
            tensors[key][...] = value
        self.after(one, tensors)
        return True

    def forget(self, recording: int) -> None:
        self.forgotten.append(recording)

    def close(self) -> None:
        self.opened -= 1

    def failing_once(self, network: str) -> None:
        """Lets the next run of a network fail after it has run."""

        def fails(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
            if run[0] == network:
                self.after = lambda run, tensors: None
                raise GenerationError("injected")

        self.after = fails


class Queued:
    """The networks on one stream of a GPU, which runs them when it is waited for."""

    def __init__(self, networks: CallersNetworks, stream: int) -> None:
        self._networks, self._stream = networks, stream
        self._last: dict[str, tuple[int, Run]] = {}
        self.close, self.forget = networks.close, networks.forget

    def run(self, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool) -> bool:
        networks, gpu, one = self._networks, self._networks.gpu, (name, size.tokens, size.batch_size)
        assert gpu is not None
        if captured and self._last.get(name) != (recording, one):
            raise GenerationError("TensorRT requires a run before the one that is captured")
        self._last[name] = recording, one
        networks.recorded[one] += captured
        spec = networks.specs[name]
        for key, tensor in {**spec.inputs, **spec.outputs}.items():
            gpu.check(addresses[key], tensor.size(size))
        gpu.queue(self._stream, lambda: networks.run(name, addresses, size, 0, False))
        return True


@functools.lru_cache(16)  # of two bundles
def _session(file: str, _changed: int) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(file, options)


@functools.lru_cache(10_000)  # the steps of a sequence have its buffers
def _array(address: int, tensor: Tensor, size: RunSize) -> np.ndarray:
    memory = (ctypes.c_char * tensor.size(size)).from_address(address)
    return np.frombuffer(memory, tensor.dtype).reshape(tensor.dims(size))


def callers_engine(bundle: Bundle, gpu: Gpu | None = None, number: int = 0) -> tuple[Engine, CallersNetworks]:
    """An engine on such networks; `number`: of the GPU, where there is one."""
    networks, device = CallersNetworks(bundle, gpu), None if gpu is None else number
    return Engine(bundle, load_networks(bundle, {"verify": False}, "cpu", networks, device)), networks
