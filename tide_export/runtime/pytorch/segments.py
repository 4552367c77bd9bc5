"""The segment networks on PyTorch: on a GPU, where CUDA graphs record their runs, and on the CPU.

Tensors are views of the buffers' own memory. On a GPU the networks run on the buffers' stream, and what a run computes
in between comes from a memory pool that serves this stream alone: replays of recorded runs use the same addresses.
"""

import contextlib
import ctypes
import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import onnx
import torch

from tide_export import names
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError, GenerationError, ProviderError, first_line
from tide_export.runtime.onnxruntime.bindings import check_tensors, external_array
from tide_export.runtime.onnxruntime.external_data import external_tensors
from tide_export.runtime.pytorch.program import Kernels, Program, tensor_of
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.segmented.cuda import CudaDevice, select_gpu
from tide_export.runtime.segmented.device import Device, HostDevice
from tide_export.runtime.segmented.network_spec import Network, NetworkSpec, specs

MAX_VIEWS = 4096  # tensors over addresses that a network keeps


def open_torch(
    bundle: Bundle,
    device: str | None = None,
    threads: int | None = None,
    kernels: Kernels | None = None,
    gpu: int | None = None,
) -> SegmentBackend:
    """The bundle's segment networks in PyTorch.

    Args:
        device: "cpu" or "cuda"; None: the GPU if PyTorch finds one, else the CPU.
        threads: threads PyTorch may use on the CPU, in the whole process; None leaves it as it is.
        kernels: what computes some operators, by domain and name, in place of their functions.
        gpu: the number of the GPU, which there must be then; None: the first, if there is one.

    Raises:
        ProviderError: the bundle has no segment networks, or one computes with what is not known here; or the GPU or
            its bindings are missing.
        BundleError: a network does not load, or is not the manifest's.
    """
    manifest, info = bundle.manifest, bundle.manifest.networks
    if info is None:
        raise ProviderError(
            f"bundle '{bundle.path}' holds no segment networks: export it with --target tensorrt or tensorrt-rtx"
        )
    wanted = device or ("cuda" if gpu is not None or torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ProviderError("PyTorch finds no GPU here")
    target = torch.device(f"cuda:{gpu or 0}" if wanted == "cuda" else wanted)
    if target.type == "cuda":
        select_gpu(target.index)
    if threads is not None:
        torch.set_num_threads(threads)
    expected = specs(manifest, info)
    programs = _programs(bundle, expected, target, kernels)

    def open_device() -> tuple[Device, Mapping[str, Network]]:
        if target.type == "cpu":
            return HostDevice(), {name: TorchNetwork(programs[name], spec) for name, spec in expected.items()}
        queue = CudaDevice(gpu=target.index)
        pool = _Pool(queue.stream, target)
        return queue, {name: TorchNetwork(programs[name], spec, pool) for name, spec in expected.items()}

    return SegmentBackend(manifest, info, expected, open_device, "torch")


def _programs(
    bundle: Bundle, expected: Mapping[str, NetworkSpec], device: torch.device, kernels: Kernels | None
) -> dict[str, Program]:
    """The networks by name; weights that several of them share are on the device once."""
    programs, shared = {}, dict[Any, torch.Tensor]()
    location = f"{names.SEGMENTS_FOLDER}/{names.SEGMENTS_WEIGHTS_FILE}"
    for name, spec in expected.items():
        file = bundle.file(names.network_file(name))
        graph = file.read_bytes()
        try:
            model = onnx.load_model_from_string(graph)
            tensors = external_tensors(graph)
        except Exception as error:  # protobuf's exceptions have no name in every release
            raise BundleError(f"'{file.path}' is no ONNX model: {first_line(error)}") from None
        weights = {}
        with bundle.file(location).mapped() if tensors else contextlib.nullcontext(b"") as memory:
            for tensor in tensors:
                if tensor.location != PurePosixPath(location).name:
                    raise BundleError(f"'{file.path}' keeps {tensor.name} in another file than {location}")
                key = (tensor.offset, tensor.dtype, tensor.shape)
                if key not in shared:
                    array = external_array(tensor, memory, str(file.path))
                    shared[key] = tensor_of(array, tensor.dtype, tensor.shape).to(device)
                weights[tensor.name] = shared[key]
        program = Program(model, weights, device, str(file.path), kernels)
        check_tensors(program, spec, str(file.path))
        programs[name] = program
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the networks run on streams that do not wait for this one
    return programs


class _Pool:
    """PyTorch's work on one stream, with its memory."""

    def __init__(self, stream: int, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.ExternalStream(stream, device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            torch.cuda.use_mem_pool(self._pool, self._device),
        ):
            yield


class TorchNetwork:
    """One network on one queue."""

    def __init__(self, program: Program, spec: NetworkSpec, pool: _Pool | None = None) -> None:
        self._program, self._spec, self._pool = program, spec, pool
        self._fixed: dict[tuple[int, int], list[Any]] = {}  # the slots that shapes determine, by shape
        self._views: dict[Any, torch.Tensor] = {}

    def run(self, addresses: Mapping[str, int], tokens: int, batch_size: int = 1) -> None:
        """Queues a run, on the CPU runs at once.

        Raises:
            GenerationError: PyTorch failed.
        """
        try:
            with torch.inference_mode(), self._pool() if self._pool is not None else contextlib.nullcontext():
                self._run(addresses, tokens, batch_size)
        except Exception as error:  # of many kinds: RuntimeError, IndexError, ValueError, torch.OutOfMemoryError
            raise GenerationError(f"PyTorch failed in {self._spec.name}: {first_line(error)}") from error

    def _run(self, addresses: Mapping[str, int], tokens: int, batch_size: int) -> None:
        program, shape = self._program, (tokens, batch_size)
        views = {
            name: self._view(addresses[name], tensor.dtype, tensor.dims(tokens, batch_size))
            for tensors in (self._spec.inputs, self._spec.outputs)
            for name, tensor in tensors.items()
        }
        fixed = self._fixed.get(shape)
        slots = list(program.base if fixed is None else fixed)
        for name, slot in program.inputs.items():
            slots[slot] = views[name]
        for step in program.steps:
            if step.static and fixed is not None:
                continue
            inputs: list[Any] = [slots[slot] if slot >= 0 else None for slot in step.inputs]
            if step.target is not None:
                result = views[step.target]
                if result.data_ptr() != inputs[0].data_ptr():
                    result.copy_(inputs[0])
                step.call(result, *inputs[1:])
            else:
                result = step.call(*inputs)
            for slot, value in zip(step.outputs, result if isinstance(result, tuple) else (result,), strict=False):
                slots[slot] = value
            for slot in step.free:
                slots[slot] = None
        for name, slot in program.outputs.items():
            if slots[slot].data_ptr() != addresses[name]:
                views[name].copy_(slots[slot])
        if fixed is None:
            kept = enumerate(zip(program.base, slots, strict=True))
            self._fixed[shape] = [value if slot in program.static else base for slot, (base, value) in kept]

    def _view(self, address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The memory at an address as a tensor."""
        key = (address, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            kind = getattr(torch, dtype)
            size = math.prod(shape) * kind.itemsize
            memory = _on_host(address, size) if self._pool is None else torch.as_tensor(_Memory(address, size))
            view = self._views[key] = memory.view(kind).reshape(shape)
        return view


def _on_host(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


class _Memory:
    """Bytes on the GPU, as PyTorch takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3
        }  # fmt: skip
