"""The demo bundle's segment networks in ONNX Runtime, on the host and behind a fake of the CUDA runtime."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_cudart import FakeCudart

from tide_export.bundle import Bundle, open_bundle
from tide_export.manifest import Manifest
from tide_export.runtime.engine import Engine
from tide_export.runtime.segmented import cuda
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.segmented.onnxruntime import open_segments
from tide_export.runtime.segmented.state import SegmentedState


@pytest.fixture(scope="session")
def opened(demo_bundle: Path) -> Bundle:
    return open_bundle(demo_bundle, verify=False)


@pytest.fixture(scope="session")
def backend(opened: Bundle) -> SegmentBackend:
    return open_segments(opened, threads=1)


@pytest.fixture(scope="session")
def segmented(opened: Bundle, backend: SegmentBackend) -> Engine:
    return Engine(opened, backend, SegmentedState)


class QueuedNetwork:
    """A network whose runs are queued on the fake stream, as TensorRT's are on a real one."""

    def __init__(self, network, fake: FakeCudart) -> None:
        self.network, self.fake = network, fake

    def run(self, addresses, tokens: int, rows: int = 1) -> None:
        addresses = dict(addresses)
        self.fake.enqueue(lambda: self.network.run(addresses, tokens, rows))


class FakeGpu:
    """A backend's networks on lanes that live on `CudaDevice`, graphs recorded and all."""

    def __init__(self, backend: SegmentBackend, fake: FakeCudart) -> None:
        self.real, self.fake = backend, fake

    def open_lane(self):
        _, networks = self.real._open_lane()
        return cuda.CudaDevice(), {name: QueuedNetwork(network, self.fake) for name, network in networks.items()}

    def backend(self, manifest: Manifest) -> SegmentBackend:
        # So that longer steps are run in parts, and the head over a batch too.
        short = replace(self.real._info, most_tokens=16, most_logits=2, most_rows=3, row_tokens=5)
        return SegmentBackend(manifest, short, self.real.specs, self.open_lane)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(cuda, "import_cudart", lambda: fake)
    return fake


@pytest.fixture
def on_fake_gpu(opened: Bundle, backend: SegmentBackend, fake: FakeCudart) -> Engine:
    return Engine(opened, FakeGpu(backend, fake).backend(opened.manifest), SegmentedState)
