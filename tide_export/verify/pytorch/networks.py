"""Runs the segment networks in PyTorch on the CPU, on views of the sequences' memory."""

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import onnx
import torch

from tide_export.bundle.file_names import network_file
from tide_export.bundle.network_spec import NetworkSpec, RunSize, specs
from tide_export.bundle.opened import Bundle
from tide_export.errors import BundleError, GenerationError, ProviderError, first_line
from tide_export.runtime.callers_networks import load_networks
from tide_export.runtime.engine import Engine
from tide_export.verify.pytorch.program import Program


def open_torch(bundle: Bundle) -> Engine:
    """Opens an engine on the bundle's segment networks in PyTorch.

    Raises:
        ProviderError: the bundle has no segment networks, or one has an operator that is not supported here.
        BundleError: a network does not load.
    """
    info = bundle.manifest.networks
    if info is None or bundle.manifest.has_cuda_networks:
        raise ProviderError(
            f"bundle '{bundle.path}' holds no segment networks for TensorRT, which PyTorch runs: export it with "
            "--target tensorrt or tensorrt-rtx"
        )
    networks = TorchNetworks(bundle, specs(bundle.manifest, info))
    return Engine(bundle, load_networks(bundle, {"verify": False}, "cpu", lambda stream: networks))


class TorchNetworks:
    """Runs the networks of one bundle (a `callers_networks.Networks`)."""

    def __init__(self, bundle: Bundle, expected: Mapping[str, NetworkSpec]) -> None:
        self._networks = {}
        for name, spec in expected.items():
            file = bundle.file(network_file(name))
            try:
                model = onnx.load(str(file.path))
            except Exception as error:  # protobuf's exception class differs between releases
                raise BundleError(f"'{file.path}' is no ONNX model: {first_line(error)}") from None
            program = Program(model, {}, torch.device("cpu"), str(file.path))
            self._networks[name] = TorchNetwork(program, spec)

    def run(self, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool) -> bool:
        self._networks[name].run(addresses, size)
        return False

    def forget(self, recording: int) -> None:
        """Does nothing: nothing is recorded."""

    def close(self) -> None:
        """Does nothing: all sets of buffers share these networks."""


class TorchNetwork:
    """Runs one network."""

    def __init__(self, program: Program, spec: NetworkSpec) -> None:
        self._program, self._spec = program, spec
        self._fixed: dict[RunSize, list[Any]] = {}  # the slots that shapes determine

    def run(self, addresses: Mapping[str, int], size: RunSize) -> None:
        """Runs the network on the memory at `addresses`; GenerationError if PyTorch failed."""
        try:
            with torch.inference_mode():
                self._run(addresses, size)
        except Exception as error:  # of many kinds: RuntimeError, IndexError, ValueError
            raise GenerationError(f"PyTorch failed in {self._spec.name}: {first_line(error)}") from error

    def _run(self, addresses: Mapping[str, int], size: RunSize) -> None:
        program = self._program
        views = {
            name: _on_host(addresses[name], tensor.dtype, tensor.dims(size))
            for tensors in (self._spec.inputs, self._spec.outputs)
            for name, tensor in tensors.items()
        }
        fixed = self._fixed.get(size)
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
            self._fixed[size] = [value if slot in program.static else base for slot, (base, value) in kept]


def _on_host(address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a view of the memory at an address."""
    kind = getattr(torch, dtype)
    memory = (ctypes.c_uint8 * (math.prod(shape) * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(kind).reshape(shape)
