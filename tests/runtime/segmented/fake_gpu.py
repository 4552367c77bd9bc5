"""Segment networks of ONNX Runtime over the fake CUDA runtime."""

from dataclasses import replace

from fake_cudart import FakeCudart

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.segmented import cuda
from tide_export.runtime.segmented.backend import SegmentBackend


class QueuedNetwork:
    """A network whose runs are queued on the fake stream, as TensorRT's are on a real one."""

    def __init__(self, network, fake: FakeCudart) -> None:
        self.network, self.fake = network, fake
        self.last: tuple[int, int] | None = None  # tokens and rows of the run before

    def run(self, addresses, tokens: int, rows: int = 1) -> None:
        addresses = dict(addresses)
        if self.fake.capture is not None:
            assert self.last == (tokens, rows), "TensorRT asks for a run between a change of shape and a recording"
        self.last = (tokens, rows)
        self.fake.enqueue(lambda: self.network.run(addresses, tokens, rows))


class FakeGpu:
    """A backend's networks in buffers of a `CudaDevice`, graphs recorded and all."""

    def __init__(self, backend: SegmentBackend, fake: FakeCudart) -> None:
        self.real, self.fake = backend, fake

    def open_device(self):
        _, networks = self.real._open_device()
        return cuda.CudaDevice(), {name: QueuedNetwork(network, self.fake) for name, network in networks.items()}

    def backend(self, manifest: Manifest) -> SegmentBackend:
        # So that longer steps are run in parts, and the head over a batch too.
        short = replace(self.real._info, max_tokens=33, max_logits=2, max_batch_size=3, max_slot_tokens=5)
        return SegmentBackend(manifest, short, self.real.specs, self.open_device, "cpu")
