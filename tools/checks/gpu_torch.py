"""Checks a bundle's segment networks in PyTorch on a GPU, over the runtime's own memory, stream and CUDA graphs.

    python tools/checks/gpu_torch.py BUNDLE [options of networks.py]

It needs PyTorch for CUDA alone: what the runtime itself does on a GPU is seen where neither TensorRT nor ONNX Runtime's
build for GPUs is at hand. The library calls Python for a run only until that run is recorded as a CUDA graph, so what
is generated later are replays. Exit code 1 where something differs, or where nothing was recorded.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import networks as checks
import onnx
import torch

from tide_export.bundle.file_names import network_file
from tide_export.bundle.network_spec import RunSize, specs
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.runtime.callers_networks import load_networks
from tide_export.runtime.engine import Engine
from tide_export.verify.pytorch import networks as in_pytorch
from tide_export.verify.pytorch.program import Program

View = Callable[[int, str, tuple[int, ...]], torch.Tensor]


class _Memory:
    """Bytes on the GPU, as PyTorch takes them."""

    def __init__(self, address: int, size: int) -> None:
        interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = interface


def on_gpu(address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The memory at an address as a tensor; at least one byte."""
    kind = getattr(torch, dtype)
    return torch.as_tensor(_Memory(address, torch.Size(shape).numel() * kind.itemsize)).view(kind).reshape(shape)


class GpuNetworks:
    """The networks of a bundle on a device.

    Attributes:
        runs: that were called for, and of these those that were recorded, by network.
    """

    def __init__(self, bundle: Bundle, device: str = "cuda", view: View = on_gpu) -> None:
        info = bundle.manifest.networks
        assert info is not None
        self.expected, self.view = specs(bundle.manifest, info), view
        self.programs = {}
        for name in self.expected:
            file = str(bundle.path / network_file(name))
            self.programs[name] = Program(onnx.load(file), {}, torch.device(device), file)
        self.runs, self.recorded = Counter[str](), Counter[str]()
        if device == "cuda":
            torch.cuda.synchronize()  # the networks run on streams that do not wait for this one

    def __call__(self, stream: int | None) -> "OnStream":
        return OnStream(self, stream)


class OnStream:
    """The networks on one stream. What PyTorch allocates in the runs of a shape is in a pool of its own: a run that is
    recorded, which comes after one like it, allocates nothing. What a shape keeps (values that it determines) is
    allocated in its first run: in a pool of all shapes that would be where temporaries of recorded runs are."""

    def __init__(self, networks: GpuNetworks, stream: int | None) -> None:
        self._all = networks
        self._networks = {
            name: in_pytorch.TorchNetwork(program, networks.expected[name])
            for name, program in networks.programs.items()
        }
        self._stream = None if stream is None else torch.cuda.ExternalStream(stream)
        self._pools = dict[tuple[str, RunSize], torch.cuda.MemPool]()

    def run(self, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool) -> bool:
        self._all.runs[name] += 1
        self._all.recorded[name] += captured
        with contextlib.ExitStack() as within:
            within.enter_context(patch.object(in_pytorch, "_on_host", self._all.view))
            if self._stream is not None:
                shape = (name, size)
                if shape not in self._pools:
                    self._pools[shape] = torch.cuda.MemPool()
                within.enter_context(torch.cuda.stream(self._stream))
                within.enter_context(torch.cuda.use_mem_pool(self._pools[shape]))
            self._networks[name].run(addresses, size)
        return True

    def forget(self, recording: int) -> None:
        """Forgets nothing, as nothing is kept for a recording."""

    def close(self) -> None:
        self._networks.clear()


def main(arguments: list[str]) -> int:
    """The exit code."""
    made: list[GpuNetworks] = []

    def opened(options: Any) -> Engine:
        bundle = open_bundle(options.bundle)
        made.append(GpuNetworks(bundle))
        return Engine(bundle, load_networks(bundle, {"verify": False}, "cpu", made[0], 0))

    with patch.object(checks, "opened", opened):
        code = checks.main([arguments[0], checks.TORCH, *arguments[1:]])
    recorded = made[0].recorded.total()
    print(f"{made[0].runs.total()} runs were called for, of which {recorded} were recorded as CUDA graphs")
    return code or int(recorded == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
